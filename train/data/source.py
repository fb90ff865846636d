"""What records come from: the rows of files one after the other, or records that can be taken in any order."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.data import readers
from train.data.records import label_texts, record_table
from train.errors import LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

SHARD_BITS = 40


@dataclass(frozen=True)
class Shards:
    """The rows of a split's files. Key: shard << 40 | row in the shard."""

    root: str  # what file names are told relative to
    reader: readers.Reader

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(relative(file, self.root) for file in self.reader.files)

    @property
    def shards(self) -> int:
        return len(self.reader.files)

    @property
    def sizes(self) -> list[int | None]:
        """Rows of each shard, None where not known yet."""
        return self.reader.sizes

    @staticmethod
    def key(shard: int, row: int) -> int:
        return shard << SHARD_BITS | row

    def where(self, key: int) -> str:
        return f"{relative(self.reader.files[key >> SHARD_BITS], self.root)} row {key & ((1 << SHARD_BITS) - 1)}"

    def rows(self, shard: int, start: int, columns: tuple[str, ...]) -> Iterator[pa.Table]:
        """Some columns of a shard as its file stores them, some rows at a time. Raises RunError naming a file that breaks."""
        try:
            yield from self.reader.batches(shard, start, columns)
        except LockstepError:
            raise
        except Exception as error:
            raise readers.unreadable(self.reader.files[shard], error) from error


@dataclass(frozen=True)
class StreamSource(Shards):
    """Pictures and labels to be read from the start of a shard, or from a row on."""

    image: str
    label: str

    @property
    def names(self) -> tuple[str, ...]:
        """The class names that the data set itself tells."""
        return self.reader.names.get(self.label, ())

    def tables(self, shard: int, start: int = 0) -> Iterator[pa.Table]:
        """The records of a shard from row `start` on, some at a time."""
        for table in self.rows(shard, start, (self.image, self.label)):
            yield record_table(table[self.image], table[self.label], self.reader.files[shard], self.names)

    def labels(self) -> Iterator[tuple[int, pa.Array]]:
        """All labels, by column projection where the format can; each array with the key of its first row."""
        for shard in range(self.shards):
            row = 0
            for table in self.rows(shard, 0, (self.label,)):
                yield self.key(shard, row), label_texts(table[self.label], self.names)
                row += table.num_rows
            self.sizes[shard] = row

    def count(self) -> None:
        """Fill in the sizes that are not known, by reading every shard once."""
        if None in self.sizes:
            for _ in self.labels():
                pass

    def begins(self, shard: int) -> bool:
        """Whether the shard has a first row."""
        return next(self.rows(shard, 0, (self.label,)), None) is not None


class MapSource(ABC):
    """Records to be taken in any order. Key: the number of the record."""

    files: tuple[str, ...]

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def take(self, keys: NDArray[np.int64]) -> pa.Table:
        """The records of these keys, in their order."""

    @abstractmethod
    def where(self, key: int) -> str:
        """What a record is called where something is told of it."""


Source = MapSource | StreamSource


@dataclass(frozen=True)
class Sources:
    train: Source
    validation: Source | None
    notes: tuple[str, ...]  # a line for each thing that was decided here
    identity: Mapping[str, Any]  # by what the training data are known again


def relative(file: str, root: str) -> str:
    """A file's name as it is told: below the data path, or the address of a remote one."""
    return os.path.relpath(file, root) if root and not readers.is_remote(file) else file
