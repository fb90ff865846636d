"""How the measurements are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(table: Table, lines: Iterable[str]) -> None:
    """On stdout, as wide as it is where that is no terminal, with remarks below."""
    console = Console(width=None if sys.stdout.isatty() else 400)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def spread(form: str, middle: float, values: Sequence[float]) -> str:
    """A median with the least and the most."""
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(middle) + (f" ({low} to {high})" if low != high else "")
