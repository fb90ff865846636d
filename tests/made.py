"""Sets of numbered 8 x 8 pictures that a test makes itself, and a configuration whose model reads the numbers back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIDE = 8
CLASSES = 3

# Pixels reach the model as value / 255 and nothing else, so that `tests.spies.ids_of` is exact.
CONFIG = """
data: {path: set, workers: 0, image: {mean: [0], std: [1]}}
model: {name: "tests.spies:Spy", norm: true, dropout: 0.5}
optimizer: {name: SGD, lr: 0.1, momentum: 0.9}
"""
QUIET = """
batch: {size: 8, lanes: 4}
evaluate: {every: 0}
checkpoint: {every: 0}
tracking: {every: 1}
"""


def config(folder: Path, text: str = CONFIG) -> str:
    """A configuration for the set that is made in folder/set, or another one that `text` begins; it lacks steps or epochs."""
    path = folder / "spy.yaml"
    path.write_text(text + QUIET)
    return str(path)


def pixels(number: int) -> np.ndarray:
    """Sample `number` (below 256): red is the number everywhere, so that flips and padded crops keep it; the rest is noise."""
    picture = np.random.RandomState(number).randint(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    picture[..., 0] = number
    return picture


def png(number: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels(number)).save(data, "png")
    return data.getvalue()


def label_of(number: int) -> int:
    return number % CLASSES


def shards(folder: Path, sizes: Sequence[int], split: str = "train", label: Callable[[int], int] = label_of) -> Path:
    """A parquet file of each size, its samples numbered on from one file to the next."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for place, size in enumerate(sizes):
        numbers = range(first, first + size)
        first += size
        images = pa.array(
            [{"bytes": png(n), "path": None} for n in numbers], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
        table = pa.table({"image": images, "label": pa.array([label(n) for n in numbers], pa.int64())})
        # Small row groups, so that a start in the middle of a file happens.
        pq.write_table(table, folder / f"{split}-{place:05d}-of-{len(sizes):05d}.parquet", row_group_size=4)
    return folder


def json_lines(folder: Path, sizes: Sequence[int]) -> Path:
    """The same as JSON Lines that name picture files: a format that does not tell how many rows a file has."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    first = 0
    for place, size in enumerate(sizes):
        rows = []
        for number in range(first, first + size):
            (folder / "pictures" / f"{number}.png").write_bytes(png(number))
            rows.append({"image": f"pictures/{number}.png", "label": label_of(number)})
        first += size
        name = f"train-{place:05d}-of-{len(sizes):05d}.jsonl"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def class_folders(folder: Path, numbers: Iterable[int], split: str = "train") -> Path:
    """A folder of PNG files for each class."""
    for number in numbers:
        target = folder / split / f"class{label_of(number)}" / f"{number:03d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(png(number))
    return folder
