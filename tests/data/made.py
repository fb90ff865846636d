"""Small data sets made on the spot, and readings of them."""

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from train.config.schema import Data
from train.data.labels import Labels
from train.data.pictures import open_pictures
from train.data.source import MapSource, Source, Sources


def png(shade: int = 0) -> bytes:
    data = io.BytesIO()
    Image.new("L", (4, 4), shade).save(data, "png")
    return data.getvalue()


def picture(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(shade))


def parquet(path: Path, labels: Any, row_group_size: int | None = None, **columns: Any) -> Path:
    """Row i holds a picture of shade i."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = pa.array(
        [{"bytes": png(shade), "path": None} for shade in range(len(labels))],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({"image": images, "label": labels, **columns}), path, row_group_size=row_group_size)
    return path


def json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(source: Source) -> list[tuple[int, dict[str, Any]]]:
    """Every record with its key, in the source's own order."""
    if isinstance(source, MapSource):
        return list(enumerate(source.take(np.arange(source.size)).to_pylist()))
    found = []
    for shard in range(source.shards):
        rows = [row for table in source.tables(shard) for row in table.to_pylist()]
        found += [(source.key(shard, place), row) for place, row in enumerate(rows)]
    return found


@dataclass
class Opened:
    """A data set of pictures, and its labels."""

    sources: Sources
    labels: Labels

    @property
    def train(self) -> Source:
        return self.sources.train

    @property
    def validation(self) -> Source | None:
        return self.sources.validation

    @property
    def notes(self) -> tuple[str, ...]:
        return self.sources.notes

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.names


def opened(path: Path | str, say: Callable[[str], None] = lambda line: None, **keys: Any) -> Opened:
    return Opened(*open_pictures(Data(path=str(path), **keys), say))


def ids(sources: Opened) -> list[int | str]:
    """The class of every training record, or the complaint about it with its place."""
    found: list[int | str] = []
    for key, row in rows_of(sources.train):
        try:
            found.append(sources.labels.id(row["label"]))
        except ValueError as error:
            found.append(f"{sources.train.where(key)}: {error}")
    return found
