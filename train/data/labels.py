"""Labels travel as text, the name of their class; this says which number each is, and which are none."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MISSING = frozenset({"", "na", "n/a", "nan", "none", "null", "<na>"})  # written for "no label"; a class only when listed

MOST_NUMBERED = 1_000_000  # classes that are made up from numbers; more is an identifier or a broken label


@dataclass(frozen=True)
class Labels:
    """The class names in the order of their ids."""

    names: tuple[str, ...]
    _ids: dict[str | None, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {name: place for place, name in enumerate(self.names)})

    def id(self, label: str | None) -> int:
        """The class of a label. Raises ValueError, saying what is allowed, for a label that is none."""
        known = self._ids.get(label)
        return self._read(label) if known is None else known

    def _read(self, label: str | None) -> int:
        text = (label or "").strip()
        if text in self._ids:
            return self._ids[text]
        if label is None or text == "":
            raise ValueError("the label is missing")
        count = len(self.names)
        by_number = self.names == numbered(count) or not any(integer(name) is not None for name in self.names)
        place = integer(text)
        if by_number and place is not None:
            if 0 <= place < count:
                return place
            raise ValueError(f"label {text} is outside 0..{count - 1} ({count} classes)")
        if self.names == numbered(count):
            raise ValueError(f"label {text!r} is not a whole number in 0..{count - 1} ({count} classes)")
        near = difflib.get_close_matches(text, self.names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"label {text!r} is not one of the {count} classes ({listed(self.names)}){hint}")


def numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def integer(text: str) -> int | None:
    """The whole number a text says, also as 2.0 or with blanks around it."""
    value = number(text)
    return int(value) if value is not None and value.is_integer() else None


def listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f", ... {len(names) - most} more" if len(names) > most else "")


def infer(found: Mapping[str, str]) -> tuple[str, ...]:
    """The classes of a label column without names: 0..max where labels are numbers, else the distinct texts, sorted.

    `found` maps each distinct label to the place where it stands first. What is written for "no label" makes no class.
    """
    values = {label: place for label, place in found.items() if label.strip().lower() not in MISSING}
    numbers = {label: whole for label in values if (whole := integer(label)) is not None}
    texts = [label for label in values if number(label) is None]
    if texts and numbers:
        one = next(iter(numbers))
        raise UsageError(
            f"labels are numbers in some rows ({one!r} in {values[one]}) and text in others ({texts[0]!r} in "
            f"{values[texts[0]]}); set data.classes to the number or the list of the classes that are meant"
        )
    if texts:
        return tuple(sorted({label.strip() for label in texts}))
    last = max(numbers, key=numbers.__getitem__, default="-1")
    if numbers.get(last, -1) < 0:
        raise RunError("the label column has no label in any row of the training split")
    if numbers[last] >= MOST_NUMBERED:
        raise UsageError(f"label {last} in {values[last]} would make {last} classes; set data.classes if it does")
    return numbered(numbers[last] + 1)
