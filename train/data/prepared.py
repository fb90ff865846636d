"""What files hold, written once to the cache of `datasets` as one Arrow table, for rows to be taken in any order."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa

from train.data.download import CACHE_REFUSED
from train.data.labels import listed
from train.data.locate import chain
from train.data.records import unfetched
from train.errors import LockstepError, RunError

if TYPE_CHECKING:
    from train.data.source import Shards, StreamSource

SECONDS = 5  # between two words about how far it is

PICTURES = datasets.Features(
    {
        "image": {"bytes": datasets.Value("large_binary"), "path": datasets.Value("string")},
        "label": datasets.Value("string"),
        "key": datasets.Value("int64"),  # of the stream, which says where the row comes from
    }
)


@dataclass(frozen=True)
class Table:
    """What is to be written of some files: `tables(shard)` has the columns `features`, and `made_by` is all that they depend on
    beside the files."""

    name: str  # of what a row is, in the plural
    files: Shards
    features: datasets.Features
    made_by: str
    tables: Callable[[int], Iterator[pa.Table]]
    rows: int  # that are kept together

    @property
    def fingerprint(self) -> str:
        """Of all that the rows are made of, with the files as they are now."""
        digest = hashlib.sha256(f"{datasets.__version__} {self.features} {self.made_by}".encode())
        for file in self.files.reader.files:
            path = Path(file)
            state = path.stat() if path.exists() else None
            digest.update(f"{file} {state and (state.st_size, state.st_mtime_ns)}\n".encode())
        return digest.hexdigest()[:32]


class Written(datasets.ArrowBasedBuilder):  # type: ignore[misc]  # `datasets` has no types
    """`datasets` writes it under a lock and moves it into place whole, so that processes may ask for it together."""

    content: Table
    say: Callable[[str], None]

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        return [datasets.SplitGenerator("train", gen_kwargs={"shards": list(range(self.content.files.shards))})]

    def _generate_tables(self, shards: list[int]) -> Iterator[tuple[Any, pa.Table]]:
        rows, told = 0, time.monotonic()
        for shard in shards:
            for number, table in enumerate(self.content.tables(shard)):
                yield datasets.builder.Key(shard, number), table
                rows += table.num_rows
                if time.monotonic() - told > SECONDS:
                    self.say(f"{rows:,} {self.content.name} written, in file {shard + 1} of {len(shards)}")
                    told = time.monotonic()


def prepare(content: Table, say: Callable[[str], None]) -> Any:
    """The table as a `datasets.Dataset`, from the cache where it was written before."""
    try:
        builder = Written(
            dataset_name=content.name,
            hash=content.fingerprint,
            features=content.features,
            writer_batch_size=content.rows,
        )
        builder.content, builder.say = content, say
        if not Path(builder.cache_dir).exists():
            say(f"writing the {content.name} of {content.files.shards} files to the cache {builder.cache_dir}")
        builder.download_and_prepare()
        if not builder.info.splits["train"].num_examples:  # which `datasets` cannot open
            raise RunError(f"there are no {content.name} in {listed(content.files.files)}")
    except Exception as error:
        causes = chain(error)
        for cause in causes:
            if isinstance(cause, LockstepError):
                raise cause from None
        if isinstance(causes[-1], OSError):
            raise RunError(CACHE_REFUSED.format(causes[-1])) from None
        raise
    return builder.as_dataset("train").with_format("arrow")


def prepare_pictures(stream: StreamSource, say: Callable[[str], None]) -> Any:
    """The records of a stream, each with its key."""

    def tables(shard: int) -> Iterator[pa.Table]:
        row = stream.key(shard, 0)
        for table in stream.tables(shard):
            for place, address in unfetched(table):  # the cache would lack it for good
                raise RunError(
                    f"{stream.where(row + place)}: {address} cannot be fetched. Mend or remove the sample, or leave such "
                    "ones out with data.streaming=true data.on_error=skip"
                )
            keys = pa.array(range(row, row + table.num_rows), pa.int64())
            row += table.num_rows
            yield table.append_column("key", keys)

    made_by = f"{stream.image} {stream.label} {stream.reader.names}"
    return prepare(Table("samples", stream, PICTURES, made_by, tables, rows=1000), say)
