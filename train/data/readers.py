"""A split as batches of raw columns, one shard a file, streamed by `datasets`; and what is known of a file before that.

Each file is a data set of its own, as `datasets` would cast all files of one to the columns and types of the first. It is
made when its shard is read, since that takes milliseconds.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from train.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROWS = 1000  # of a batch; what is held in memory at a time
PIECE = 2**20  # characters of a text file
IMAGE, CLASS = "image", "class label"  # the kinds of a column that say what the column is for

COMPRESSED = {".gz": "gzip", ".bz2": "bz2"}

T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """A split's shards. `columns[i]` tells the kind of each column of shard i: IMAGE, CLASS or the name of a type."""

    files: tuple[str, ...]
    sizes: list[int | None]
    columns: Sequence[dict[str, str]]
    batches: Callable[[int, int, Sequence[str]], Iterator[pa.Table]]  # (shard, first row, column names)
    names: dict[str, tuple[str, ...]]  # of the classes, for the columns that have them
    in_pieces: bool = False  # whether the rows of a file are pieces of one text

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

    def look(file: str) -> tuple[list[int], dict[str, Any]]:
        """The row after each row group, and the columns, with what a README knows of them."""
        with open_file(file) as opened:
            footer = pq.read_metadata(opened)
        own = datasets.Features.from_arrow_schema(footer.schema.to_arrow_schema())
        own.update({name: feature for name, feature in features.items() if name in own})
        return list(itertools.accumulate(footer.row_group(i).num_rows for i in range(footer.num_row_groups))), own

    def unnamed(feature: Any) -> Any:
        """`datasets` copies the names of classes ten times before it reads a row."""
        return datasets.Value(feature.dtype) if kind(feature) == CLASS else feature

    looks = _each(files, look)

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        read = {name: unnamed(looks[shard][1][name]) for name in columns}
        options = {"columns": list(columns), "features": datasets.Features(read), "batch_size": ROWS}
        rows = _rows(datasets.IterableDataset.from_parquet, files[shard], **options)
        ends = looks[shard][0]
        first = bisect_right(ends, start)  # the row group that holds the start
        if 0 < first < len(ends):
            groups = rows.reshard()
            wanted = range(first, groups.num_shards)
            rows = datasets.concatenate_datasets([groups.shard(groups.num_shards, group) for group in wanted])
            start -= ends[first - 1]
        return _tables(rows, start)

    kinds = [{name: kind(feature) for name, feature in own.items()} for _, own in looks]
    sizes: list[int | None] = [ends[-1] if ends else 0 for ends, _ in looks]
    return Reader(tuple(files), sizes, kinds, batches, class_names(looks[0][1]))


def delimited(files: Sequence[str], features: Mapping[str, Any]) -> Reader:
    """CSV, or TSV by the suffix, with a header line; every value is its text."""
    import datasets

    def delimiter(file: str) -> str:
        return "\t" if ".tsv" in PurePath(file).suffixes else ","

    def header_of(file: str) -> list[str]:
        with _open_text(file) as text:
            return next(filter(None, csv.reader(text, delimiter=delimiter(file))), [])

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        texts = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
        options = {"sep": delimiter(files[shard]), "usecols": list(columns), "index_col": False, "na_filter": False}
        return _tables(_rows(datasets.IterableDataset.from_csv, files[shard], features=texts, **options), start)

    kinds = [dict.fromkeys(header, "text") for header in _each(files, header_of)]
    return Reader(tuple(files), [None] * len(files), kinds, batches, class_names(features))


def json_lines(files: Sequence[str], features: Mapping[str, Any]) -> Reader:
    """JSON Lines, or one JSON list of objects; a key that a row lacks is a null.

    `datasets` streams the lines as text, and they are parsed here: its JSON reader ends an epoch at a key that the first
    rows lack, turns the label cat into "cat" (in quotes) where another row has a number, and names no line that is broken.
    """
    import datasets

    def objects(file: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        numbered = enumerate(lines, start=1)
        for number, line in numbered:
            if number == 1 and line.lstrip().startswith("["):
                yield from json.loads("\n".join([line, *(rest for _, rest in numbered)]))
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
        with _open_text(file) as text:
            for row in itertools.islice(objects(file, text), 100):
                kinds.update({key: type(value).__name__ for key, value in row.items() if kinds.get(key) in (None, "NoneType")})
        return {key: "null" if its == "NoneType" else its for key, its in kinds.items()}

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        text = _tables(_rows(datasets.IterableDataset.from_text, files[shard], encoding="utf-8-sig"))
        lines = (line for table in text for line in table["text"].to_pylist())
        rows = itertools.islice(objects(files[shard], lines), start, None)
        while chunk := list(itertools.islice(rows, ROWS)):
            yield pa.table({name: pa.array([_scalar(row.get(name)) for row in chunk], pa.string()) for name in columns})

    return Reader(tuple(files), [None] * len(files), _each(files, kinds_of), batches, class_names(features))


def text(files: Sequence[str]) -> Reader:
    """Each file as it is, in pieces of about a million characters that end with a line."""

    def batches(shard: int, start: int, columns: Sequence[str]) -> Iterator[pa.Table]:
        with _open_text(files[shard]) as opened:
            pieces = iter(lambda: "".join(opened.readlines(PIECE)), "")
            for piece in itertools.islice(pieces, start, None):
                yield pa.table({"text": pa.array([piece], pa.large_string())})

    return Reader(tuple(files), [None] * len(files), [{"text": "text"}] * len(files), batches, {}, in_pieces=True)


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
        return _tables(stream.shard(shards, shard).select_columns(list(columns)).with_format("arrow"), start)

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


def _rows(read: Callable[..., Any], file: str, **options: Any) -> Any:
    """One file as an `IterableDataset`, its name taken as it is: it is no pattern, and was found before."""
    from datasets.data_files import DataFilesDict, DataFilesList

    found = DataFilesDict({"train": DataFilesList([file], [])})
    # A stream has no cache, but `datasets` locks the one it would have, and hashes all options for its name.
    with TemporaryDirectory() as cache:
        return read(found, split="train", cache_dir=cache, config_id="stream", **options).with_format("arrow")


def _tables(rows: Any, start: int = 0) -> Iterator[pa.Table]:
    """The rows of an `IterableDataset` in Arrow format from row `start` on."""
    return cast("Iterator[pa.Table]", (rows.skip(start) if start else rows).iter(ROWS))


def _open_text(file: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_file(file), encoding="utf-8-sig", newline="")


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


def _scalar(value: Any) -> str | None:
    """A JSON value as text, true and false as the numbers they are."""
    if value is None or isinstance(value, str):
        return value
    return str(int(value)) if isinstance(value, bool) else json.dumps(value)
