"""Labelled pictures: a data set opened as keyed, undecoded records, Arrow tables of `image` and `label` as `records` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from train.data.columns import Column, choose, is_image, is_label
from train.data.folders import SPLIT_NAMES
from train.data.labels import Labels, infer, listed, numbered
from train.data.order import permute
from train.data.readers import CLASS, IMAGE
from train.data.records import SCHEMA
from train.data.source import MapSource, Source, Sources, StreamSource, relative
from train.data.splits import Split, find_splits
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from train.config.schema import Data

IMAGE_COLUMN = Column(
    "data.image_column",
    lambda kind: kind == IMAGE,
    (
        "image", "img", "jpg", "jpeg", "png", "webp", "picture", "pixel_values", "file_name", "filename", "file", "path",
        "image_path", "filepath",
    ),
    is_image,
)  # fmt: skip
LABEL_COLUMN = Column(
    "data.label_column",
    lambda kind: kind == CLASS,
    ("label", "labels", "fine_label", "class", "cls", "target", "y", "category"),
    is_label,
)


@dataclass(frozen=True)
class PictureRows(MapSource):
    """Records laid out as rows of a table."""

    files: tuple[str, ...]
    rows: Any  # a `datasets.Dataset` in Arrow format
    place: Callable[[Any, int], str]  # what a row of `rows` is called

    @property
    def size(self) -> int:
        return len(self.rows)

    def take(self, keys: NDArray[np.int64]) -> pa.Table:
        table: pa.Table = self.rows[keys]
        return table.select(SCHEMA.names)

    def where(self, key: int) -> str:
        return self.place(self.rows, key)

    def labels(self) -> Iterator[tuple[int, pa.Array]]:
        """All labels; each array with the key of its first row."""
        row = 0
        for table in self.rows.select_columns(["label"]).iter(batch_size=100_000):
            yield row, table["label"].combine_chunks()
            row += table.num_rows

    def divided(self, fraction: float) -> tuple[PictureRows, PictureRows]:
        """All but that fraction of the rows, and those, drawn evenly: neighbours are often of one class."""
        order = permute(np.arange(self.size, dtype=np.int64), self.size, seed=0)
        kept = self.size - round(self.size * fraction)
        first, second = (replace(self, rows=self.rows.select(np.sort(part))) for part in (order[:kept], order[kept:]))
        return first, second


def open_pictures(data: Data, say: Callable[[str], None] = lambda line: None) -> tuple[Sources, Labels]:
    """Open the training and the validation split of `data`. `say` is told of what may take long, before it begins."""
    splits = find_splits(data, say)
    stream = _stream(splits.train, data)
    columns = f"image column: {stream.image}; label column: {stream.label}"
    train = _arranged(stream, splits.train, data, say)
    labels = Labels(_classes(stream, train, data, say))
    _fits(labels, stream, splits.train)
    known_by = splits.train.identity(train.files)
    validation: Source | None = None
    extents = []
    if data.validation_fraction is not None:
        train, validation = _divided(train, data.validation_fraction)
        extents.append(f"validation: {splits.train.extent(validation)}")
    elif splits.validation is not None:
        stream = _stream(splits.validation, data)
        _fits(labels, stream, splits.validation)
        validation = _arranged(stream, splits.validation, data, say)
        extents.append(f"validation: {splits.validation.extent(validation)}")
    classes = f"{len(labels.names)} classes: {listed(labels.names)}"
    notes = (*splits.notes, columns, classes, f"training: {splits.train.extent(train)}", *extents)
    return Sources(train, validation, notes, known_by), labels


def _stream(split: Split, data: Data) -> StreamSource:
    reader = split.reader()
    columns = choose(reader, ((IMAGE_COLUMN, data.image_column), (LABEL_COLUMN, data.label_column)))
    stream = StreamSource(split.place.root, reader, *columns)
    if all(size is None for size in reader.sizes) and not any(stream.begins(shard) for shard in range(stream.shards)):
        raise split.nothing()
    return stream


def _arranged(stream: StreamSource, split: Split, data: Data, say: Callable[[str], None]) -> PictureRows | StreamSource:
    """The stream itself, or its records laid out to be taken in any order, as class folders always are."""
    if split.place.format == "pictures":
        import datasets

        files = tuple(relative(file, split.place.root) for file in split.files)
        [table] = stream.tables(0)
        rows = datasets.Dataset(table.append_column("key", pa.array(range(len(files)), pa.int64()))).with_format("arrow")
        return PictureRows(files, rows, lambda rows, row: files[rows[row]["key"][0].as_py()])
    if data.streaming:
        return stream
    from train.data.prepared import prepare_pictures

    rows = prepare_pictures(stream, say)
    return PictureRows(stream.files, rows, lambda rows, row: stream.where(rows[row]["key"][0].as_py()))


def _divided(source: PictureRows | StreamSource, fraction: float) -> tuple[PictureRows, PictureRows]:
    if isinstance(source, StreamSource):
        raise UsageError("data.validation_fraction is of records that can be taken in any order: set data.streaming=false")
    parts = source.divided(fraction)
    if not all(part.size for part in parts):
        raise UsageError(f"data.validation_fraction: {fraction} of {source.size} samples leaves a part without any")
    return parts


def _classes(stream: StreamSource, source: PictureRows | StreamSource, data: Data, say: Callable[[str], None]) -> tuple[str, ...]:
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


def _fits(labels: Labels, stream: StreamSource, split: Split) -> None:
    """Every class that the split tells of is one of those that are trained."""
    for name in stream.names:
        try:
            labels.id(name)
        except ValueError as error:
            raise RunError(f"split {split.name} has a class that is not trained: {error}") from None
