"""Open a data set as keyed, undecoded records: Arrow tables of `image` and `label` as `records` describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from train.data import readers
from train.data.columns import choose
from train.data.folders import SPLIT_NAMES
from train.data.identity import identity
from train.data.labels import Labels, infer, listed, numbered
from train.data.locate import Located, locate, quiet
from train.data.records import SCHEMA, label_texts, record_table
from train.errors import LockstepError, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from train.config.schema import Data

SHARD_BITS = 40
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class StreamSource:
    """Shards to be read from their start, or from a row on. Key: shard << 40 | row in the shard."""

    root: str  # what file names are told relative to
    reader: readers.Reader
    image: str
    label: str

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

    @property
    def names(self) -> tuple[str, ...]:
        """The class names that the data set itself tells."""
        return self.reader.names.get(self.label, ())

    @staticmethod
    def key(shard: int, row: int) -> int:
        return shard << SHARD_BITS | row

    def where(self, key: int) -> str:
        return f"{relative(self.reader.files[key >> SHARD_BITS], self.root)} row {key & ((1 << SHARD_BITS) - 1)}"

    def tables(self, shard: int, start: int = 0) -> Iterator[pa.Table]:
        """The records of a shard from row `start` on, some at a time. Raises RunError naming a file that breaks."""
        for table in self._raw(shard, start, (self.image, self.label)):
            yield record_table(table[self.image], table[self.label], self.reader.files[shard], self.names)

    def labels(self) -> Iterator[tuple[int, pa.Array]]:
        """All labels, by column projection where the format can; each array with the key of its first row."""
        for shard in range(self.shards):
            row = 0
            for table in self._raw(shard, 0, (self.label,)):
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
        return next(self._raw(shard, 0, (self.label,)), None) is not None

    def _raw(self, shard: int, start: int, columns: tuple[str, ...]) -> Iterator[pa.Table]:
        try:
            yield from self.reader.batches(shard, start, columns)
        except LockstepError:
            raise
        except Exception as error:
            raise readers.unreadable(self.reader.files[shard], error) from error


@dataclass(frozen=True)
class MapSource:
    """Records to be taken in any order. Key: row."""

    files: tuple[str, ...]
    rows: Any  # a `datasets.Dataset` in Arrow format
    where: Callable[[int], str]

    @property
    def size(self) -> int:
        return len(self.rows)

    def take(self, keys: NDArray[np.int64]) -> pa.Table:
        """The records of these keys, in their order."""
        table: pa.Table = self.rows[keys]
        return table.select(SCHEMA.names)

    def labels(self) -> Iterator[tuple[int, pa.Array]]:
        """All labels; each array with the key of its first row."""
        row = 0
        for table in self.rows.select_columns(["label"]).iter(batch_size=100_000):
            yield row, table["label"].combine_chunks()
            row += table.num_rows


Source = MapSource | StreamSource


@dataclass(frozen=True)
class Sources:
    train: Source
    validation: Source | None
    labels: Labels
    notes: tuple[str, ...]  # a line for each thing that was decided here
    identity: Mapping[str, Any]  # by what the training data are known again

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.names


def open_data(data: Data, say: Callable[[str], None] = lambda line: None) -> Sources:
    """Open the training and the validation split of `data`. `say` is told of what may take long, before it begins."""
    quiet()
    found = place = locate(data.path, data.subset, data.revision, say=say)
    for key, given, used in (("revision", data.revision, found.revision), ("subset", data.subset, found.subset)):
        if given is not None and used is None:
            where = "the Hugging Face Hub" + " or a folder whose README.md describes subsets" * (key == "subset")
            raise UsageError(f"data.{key}: {given} means nothing, as data.path={data.path} is not on {where}: remove data.{key}")
    if data.validation_path is not None:
        place = locate(data.validation_path, data.subset, key="data.validation_path", say=say)
    train_split, validation_split = _splits(found, place, data)
    notes = list(dict.fromkeys((*found.notes, *place.notes)))
    stream = _open(found, train_split, data)
    notes.append(f"image column: {stream.image}; label column: {stream.label}")
    train = _arranged(stream, found, train_split, data, say)
    known_by = identity(found.splits[train_split], train.files, found.revision)
    labels = Labels(_classes(stream, train, data, say))
    _fits(labels, stream, train_split)
    notes += [f"{len(labels.names)} classes: {listed(labels.names)}", f"training: {_extent(train, train_split)}"]
    validation = None
    if validation_split is not None:
        stream = _open(place, validation_split, data)
        _fits(labels, stream, validation_split)
        validation = _arranged(stream, place, validation_split, data, say)
        notes.append(f"validation: {_extent(validation, validation_split)}")
    elif data.validation_split == "auto":
        notes.append(f"validation: none, {data.path} has only the splits {', '.join(found.splits)}")
    return Sources(train, validation, labels, tuple(notes), known_by)


def _splits(found: Located, place: Located, data: Data) -> tuple[str, str | None]:
    """The names of the training and of the validation split."""
    has = f"{data.path} has the splits {', '.join(found.splits)}"
    if data.train_split not in found.splits:
        raise UsageError(f"data.train_split: there is no split {data.train_split}; {has}")
    wanted = data.validation_split
    if wanted == "none":
        return data.train_split, None
    if wanted != "auto":
        if wanted not in place.splits:
            raise UsageError(
                f"data.validation_split: there is no split {wanted}; "
                f"{data.validation_path or data.path} has the splits {', '.join(place.splits)}"
            )
        return data.train_split, wanted
    for name in VALIDATION_NAMES:
        if name in place.splits and (place is not found or name != data.train_split):
            return data.train_split, name
    return data.train_split, next(iter(place.splits)) if place is not found else None


def _open(found: Located, split: str, data: Data) -> StreamSource:
    reader = _reader(found, split)
    nothing = RunError(f"split {split} has no rows ({listed(relative(file, found.root) for file in found.splits[split])})")
    if not any(reader.columns) or not any(size is None or size > 0 for size in reader.sizes):
        raise nothing
    stream = StreamSource(found.root, reader, *choose(reader, data.image_column, data.label_column))
    if all(size is None for size in reader.sizes) and not any(stream.begins(shard) for shard in range(stream.shards)):
        raise nothing
    return stream


def _reader(found: Located, split: str) -> readers.Reader:
    files = found.splits[split]
    match found.format:
        case "pictures":
            return readers.pictures(found.root, files, found.labels[split])
        case "parquet":
            return readers.parquet(files, found.features)
        case "csv":
            return readers.delimited(files, found.features)
        case "json":
            return readers.json_lines(files, found.features)
        case _:
            return readers.streamed(found.builder, split, files)


def _arranged(stream: StreamSource, found: Located, split: str, data: Data, say: Callable[[str], None]) -> Source:
    """The stream itself, or its records laid out to be taken in any order, as class folders always are."""
    if found.format == "pictures":
        import datasets

        files = tuple(relative(file, found.root) for file in found.splits[split])
        rows = datasets.Dataset(pa.concat_tables(stream.tables(0))).with_format("arrow")
        return MapSource(files, rows, files.__getitem__)
    if data.streaming:
        return stream
    from train.data.prepared import prepare

    rows = prepare(stream, say)
    return MapSource(stream.files, rows, lambda row: stream.where(rows[row]["key"][0].as_py()))


def _extent(source: Source, split: str) -> str:
    if isinstance(source, MapSource):
        return f"split {split}, {source.size} samples, taken in any order"
    known = [size for size in source.sizes if size is not None]
    rows = f"{sum(known)} samples" if len(known) == source.shards else "samples not counted yet"
    return f"split {split}, {rows} in {source.shards} shard{'s' * (source.shards > 1)}, streamed"


def _classes(stream: StreamSource, source: Source, data: Data, say: Callable[[str], None]) -> tuple[str, ...]:
    """The class names: those that are configured, or that the data set tells, or that its labels show."""
    if data.classes is not None:
        return numbered(data.classes) if isinstance(data.classes, int) else data.classes
    names = stream.names
    if not names:
        if source is stream and None in stream.sizes:
            if stream.reader.remote:
                raise UsageError(
                    f"data.classes must say the number or the list of the classes: column {stream.label} has no class "
                    "names, and finding them would read the whole remote stream"
                )
            say(f"finding the classes: reading column {stream.label} of every file once")
        found: dict[str, str] = {}
        for key, labels in source.labels():
            for label in pc.unique(labels).to_pylist():
                if label is not None and label not in found:
                    found[label] = source.where(key + pc.index(labels, label).as_py())
        names = infer(found)
    if all(name.lower() in SPLIT_NAMES for name in names):
        raise RunError(f"{data.path}: the labels are the names of splits ({', '.join(names)}): there are no class folders")
    if len(names) < 2:
        raise RunError(f"{data.path}: only one class ({names[0]}), so there is nothing to learn")
    return names


def _fits(labels: Labels, stream: StreamSource, split: str) -> None:
    """Every class that the split tells of is one of those that are trained."""
    for name in stream.names:
        try:
            labels.id(name)
        except ValueError as error:
            raise RunError(f"split {split} has a class that is not trained: {error}") from None


def relative(file: str, root: str) -> str:
    """A file's name as it is told: below the data path, or the address of a remote one."""
    return os.path.relpath(file, root) if root and not readers.is_remote(file) else file
