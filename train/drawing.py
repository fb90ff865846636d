"""Plots, by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.errors import UsageError


@contextmanager
def axes_of(path: Path, height: float = 4.5) -> Iterator[Any]:
    """The axes of a figure, `height` inches high, that is saved afterwards. UsageError where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a plot needs matplotlib: pip install 'lockstep[plot]'") from error
    figure = Figure(figsize=(8, height), layout="constrained")
    yield figure.subplots()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep"}):  # text stays text, and one plot one file
        figure.savefig(path)
