"""Which columns hold the image and the label, and whether every file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.data.readers import CLASS, IMAGE
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.data.readers import Reader

IMAGE_NAMES = (
    "image", "img", "jpg", "jpeg", "png", "webp", "picture", "pixel_values", "file_name", "filename", "file", "path",
    "image_path", "filepath",
)  # fmt: skip
LABEL_NAMES = ("label", "labels", "fine_label", "class", "cls", "target", "y", "category")
NUMBERS = ("int", "uint", "float", "double", "bool", "decimal")
TEXTS = ("string", "large_string", "string_view", "text", "str")


def choose(reader: Reader, image: str, label: str) -> tuple[str, str]:
    """The image and the label column: the named ones, or with "auto" those that their types or else their names tell."""
    columns = reader.columns[0]
    chosen = (
        _choose(columns, image, IMAGE, IMAGE_NAMES, "data.image_column"),
        _choose(columns, label, CLASS, LABEL_NAMES, "data.label_column"),
    )
    for column in chosen:
        _in_every_file(reader, column)
    for column, fits, key in ((chosen[0], _is_image, "data.image_column"), (chosen[1], _is_label, "data.label_column")):
        if not fits(columns[column]):
            raise UsageError(f"{key}: column {column} of {reader.files[0]} is {columns[column]}; {_listed(columns)}")
    return chosen


def _choose(columns: dict[str, str], name: str, kind: str, names: Sequence[str], key: str) -> str:
    if name != "auto":
        if name not in columns:
            raise UsageError(f"{key}: there is no column {name}; {_listed(columns)}")
        return name
    if of_kind := [column for column, its in columns.items() if its == kind]:
        called = [column for wanted in names for column in of_kind if column.lower() == wanted]
        if len(of_kind) > 1 and not called:
            raise UsageError(f"{key} must say which column is meant: {' or '.join(of_kind)}; {_listed(columns)}")
        return (called or of_kind)[0]
    for wanted in names:
        if called := [column for column in columns if column.lower() == wanted]:
            return called[0]
    raise UsageError(f"{key} must say which column is the {key[5:-7]}, none is called by a usual name; {_listed(columns)}")


def _in_every_file(reader: Reader, column: str) -> None:
    first = family(reader.columns[0][column])
    for file, columns in zip(reader.files, reader.columns, strict=True):
        if column not in columns:
            raise RunError(f"{file}: has no column {column}, which {reader.files[0]} has; {_listed(columns)}")
        if family(columns[column]) != first and "null" not in (columns[column], reader.columns[0][column]):
            raise RunError(f"{file}: column {column} is {columns[column]}, but {reader.columns[0][column]} in {reader.files[0]}")


def family(kind: str) -> str:
    """Types that may differ between files: all numbers are one, all texts are one."""
    if kind.startswith(NUMBERS):
        return "number"
    return "text" if kind in TEXTS else kind


def _is_image(kind: str) -> bool:
    return (
        kind in (IMAGE, "binary", "large_binary")
        or kind.startswith("struct<bytes")
        or kind == "struct<path, bytes>"
        or family(kind) == "text"
    )


def _is_label(kind: str) -> bool:
    return kind in (CLASS, "null") or family(kind) in ("text", "number")


def _listed(columns: dict[str, str]) -> str:
    return "the columns are " + (", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "none")
