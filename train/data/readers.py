"""Files read as batches of raw columns, one shard a file, with what can be known of each file before it is read.

CSV and JSON Lines are read here row by row rather than by `datasets`, which takes the columns and types of the first rows
for all: a later row with another key, or a text among numbers, would end an epoch in the middle.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from train.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROWS = 1000  # of a batch; what is held in memory at a time
IMAGE, CLASS = "image", "class label"  # the kinds of a column that say what the column is for

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """A split's shards. `columns[i]` tells the kind of each column of shard i: IMAGE, CLASS or the name of a type."""

    files: tuple[str, ...]
    sizes: list[int | None]
    columns: Sequence[dict[str, str]]
    batches: Callable[[int, int, Sequence[str]], Iterator[pa.Table]]  # (shard, first row, column names)
    names: dict[str, tuple[str, ...]]  # of the classes, for the columns that have them

    @property
    def remote(self) -> bool:
        return any(map(is_remote, self.files))


def is_remote(file: str) -> bool:
    return "://" in file


def open_file(file: str) -> BinaryIO:
    """The file's bytes, wherever it lies (`datasets` retries what a network breaks), decompressed by its suffix."""
    from datasets.utils.file_utils import xopen

    raw = xopen(file, "rb")
    packed = COMPRESSED.get(PurePath(file).suffix)
    return cast("BinaryIO", pa.CompressedInputStream(raw, packed) if packed else raw)


def parquet(files: Sequence[str], features: Mapping[str, Any]) -> Reader:
    """Row counts and columns come from the footers, and a start in the middle reads only the row groups from there on."""
    import datasets

    def footer_of(file: str) -> pq.FileMetaData:
        with open_file(file) as opened:
            return pq.read_metadata(opened)

    footers = _each(files, footer_of)
    groups = [[footer.row_group(i).num_rows for i in range(footer.num_row_groups)] for footer in footers]
    every = [datasets.Features.from_arrow_schema(footer.schema.to_arrow_schema()) for footer in footers]
    for own in every:
        own.update({name: feature for name, feature in features.items() if name in own})

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        with open_file(files[shard]) as opened:
            first = 0
            while first < len(groups[shard]) and start >= groups[shard][first]:
                start -= groups[shard][first]
                first += 1
            kept = list(range(first, len(groups[shard])))
            for batch in pq.ParquetFile(opened).iter_batches(ROWS, row_groups=kept, columns=list(columns)):
                if start < batch.num_rows:
                    yield pa.Table.from_batches([batch.slice(start)])
                start = max(0, start - batch.num_rows)

    kinds = [{name: kind(feature) for name, feature in own.items()} for own in every]
    return Reader(tuple(files), [sum(counts) for counts in groups], kinds, batches, class_names(every[0]))


def delimited(files: Sequence[str], features: Mapping[str, Any]) -> Reader:
    """CSV, or TSV by the suffix, with a header line; every value is its text."""

    def rows(file: str) -> Iterator[list[str]]:
        with io.TextIOWrapper(open_file(file), encoding="utf-8-sig", newline="") as text:
            yield from csv.reader(text, delimiter="\t" if ".tsv" in file else ",", strict=True)

    headers = _each(files, lambda file: next(rows(file), []))

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        places = [headers[shard].index(name) for name in columns]
        lines = (line for line in itertools.islice(rows(files[shard]), 1, None) if line)
        for chunk in _chunks(itertools.islice(lines, start, None)):
            cells = [[line[place] if place < len(line) else None for line in chunk] for place in places]
            yield pa.table([pa.array(column, pa.string()) for column in cells], names=list(columns))

    kinds = [dict.fromkeys(header, "text") for header in headers]
    return Reader(tuple(files), [None] * len(files), kinds, batches, class_names(features))


def json_lines(files: Sequence[str], features: Mapping[str, Any]) -> Reader:
    """JSON Lines, or one JSON list of objects; a key that a row lacks is a null."""

    def rows(file: str) -> Iterator[dict[str, Any]]:
        with io.TextIOWrapper(open_file(file), encoding="utf-8-sig") as text:
            lines = enumerate(text, start=1)
            for number, line in lines:
                if number == 1 and line.lstrip().startswith("["):
                    yield from json.loads(line + text.read())
                elif line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError as error:
                        raise RunError(f"{file}:{number}: not JSON: {error}") from None
                    if not isinstance(row, dict):
                        raise RunError(f"{file}:{number}: a row is an object like {{...}}, this is {line.strip():.40}")
                    yield row

    def kinds_of(file: str) -> dict[str, str]:
        """Keys and types in the first rows: one row may lack a key, or hold a null."""
        kinds: dict[str, str] = {}
        for row in itertools.islice(rows(file), 100):
            kinds.update({key: type(value).__name__ for key, value in row.items() if kinds.get(key) in (None, "NoneType")})
        return {key: "null" if its == "NoneType" else its for key, its in kinds.items()}

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        for chunk in _chunks(itertools.islice(rows(files[shard]), start, None)):
            yield pa.table({name: pa.array([_scalar(row.get(name)) for row in chunk], pa.string()) for name in columns})

    return Reader(tuple(files), [None] * len(files), _each(files, kinds_of), batches, class_names(features))


def pictures(root: str, files: Sequence[str], labels: Sequence[str]) -> Reader:
    """Picture files and their classes, as one shard."""

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        yield pa.table({"image": pa.array(files[start:]), "label": pa.array(labels[start:])}).select(list(columns))

    kinds = {"image": IMAGE, "label": CLASS}
    return Reader((root,), [len(files)], [kinds], batches, {"label": tuple(sorted(set(labels)))})


def streamed(builder: Any, split: str, files: Sequence[str]) -> Reader:
    """Any other format, as `datasets` streams it (tar archives in WebDataset form, Arrow files, ...)."""
    import datasets

    stream = builder.as_streaming_dataset(split)
    first = next(stream.with_format("arrow").iter(batch_size=1), pa.table({}))
    features = stream.features or datasets.Features.from_arrow_schema(first.schema)
    shards = stream.num_shards
    named = tuple(files) if len(files) == shards else tuple(f"{builder.base_path} {split} {i}" for i in range(shards))

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        rows = stream.shard(num_shards=shards, index=shard).select_columns(list(columns)).with_format("arrow")
        for table in rows.iter(batch_size=ROWS):
            if start < table.num_rows:
                yield table.slice(start)
            start = max(0, start - table.num_rows)

    kinds = {name: kind(feature) for name, feature in features.items()}
    return Reader(named, [None] * shards, [kinds] * shards, batches, class_names(features))


def kind(feature: Any) -> str:
    """What a `datasets` feature is to a person."""
    import datasets

    if isinstance(feature, datasets.Image):
        return IMAGE
    if isinstance(feature, datasets.ClassLabel):
        return CLASS
    if isinstance(feature, dict):
        return f"struct<{', '.join(feature)}>"
    return str(feature.dtype) if isinstance(feature, datasets.Value) else type(feature).__name__.lower()


def class_names(features: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(feature.names) for name, feature in features.items() if kind(feature) == CLASS}


def _each(files: Sequence[str], look: Callable[[str], T]) -> list[T]:
    """`look` at every file, remote ones side by side; a file that cannot be read is named."""

    def one(file: str) -> T:
        try:
            return look(file)
        except RunError:
            raise
        except Exception as error:
            raise unreadable(file, error) from error

    with ThreadPoolExecutor(16) as pool:
        return list((pool.map if any(map(is_remote, files)) else map)(one, files))


def unreadable(file: str, error: Exception) -> RunError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return RunError(f"{file}: cannot be read (damaged, cut short or not of the format its name says): {reason}")


def _chunks(rows: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(rows)
    while chunk := list(itertools.islice(iterator, ROWS)):
        yield chunk


def _scalar(value: Any) -> str | None:
    """A JSON value as text, true and false as the numbers they are."""
    if value is None or isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, bool) else json.dumps(value)
