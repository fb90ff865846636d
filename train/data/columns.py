"""Which columns hold what a task reads, and whether every file has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from train.data.readers import CLASS, IMAGE
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from train.data.readers import Reader

NUMBERS = ("int", "uint", "float", "double", "bool", "decimal")
TEXTS = ("string", "large_string", "string_view", "text", "str")


class Column(NamedTuple):
    """A column that a task reads: the key that may name it, which kinds tell it, its usual names, and which kinds it may be."""

    key: str
    tells: Callable[[str], bool]
    names: tuple[str, ...]
    allows: Callable[[str], bool]


def choose(reader: Reader, wanted: Sequence[tuple[Column, str]]) -> list[str]:
    """The named columns, or with "auto" those that their types or else their names tell."""
    columns = reader.columns[0]
    chosen = [_choose(columns, column, name) for column, name in wanted]
    for name in chosen:
        _in_every_file(reader, name)
    for (column, _), name in zip(wanted, chosen, strict=True):
        if not column.allows(columns[name]):
            raise UsageError(f"{column.key}: column {name} of {reader.files[0]} is {columns[name]}; {_listed(columns)}")
    return chosen


def _choose(columns: dict[str, str], column: Column, name: str) -> str:
    if name != "auto":
        if name not in columns:
            raise UsageError(f"{column.key}: there is no column {name}; {_listed(columns)}")
        return name
    if telling := [known for known, kind in columns.items() if column.tells(kind)]:
        called = [known for wanted in column.names for known in telling if known.lower() == wanted]
        if len(telling) > 1 and not called:
            raise UsageError(f"{column.key} must say which column is meant: {' or '.join(telling)}; {_listed(columns)}")
        return (called or telling)[0]
    for wanted in column.names:
        if called := [known for known in columns if known.lower() == wanted]:
            return called[0]
    what = column.key[5:-7]
    raise UsageError(f"{column.key} must say which column is the {what}, none is called by a usual name; {_listed(columns)}")


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


def is_image(kind: str) -> bool:
    return (
        kind in (IMAGE, "binary", "large_binary")
        or kind.startswith("struct<bytes")
        or kind == "struct<path, bytes>"
        or family(kind) == "text"
    )


def is_label(kind: str) -> bool:
    return kind in (CLASS, "null") or family(kind) in ("text", "number")


def is_text(kind: str) -> bool:
    return kind == "null" or family(kind) == "text"


def _listed(columns: dict[str, str]) -> str:
    return "the columns are " + (", ".join(f"{name} ({kind})" for name, kind in columns.items()) or "none")
