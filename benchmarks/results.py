"""RESULTS.md: what the benchmarks have measured, a section each, written by them alone."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).parent / "RESULTS.md"
BEGINNING = "# Results\n\nWritten by the scripts beside it, each in its own section; run one again to replace its numbers.\n"


def record(heading: str, text: str) -> None:
    """Let `text` be the section under `## heading`, in the place of what stood there."""
    whole = FILE.read_text(encoding="utf-8") if FILE.exists() else BEGINNING
    section = f"## {heading}\n\n{text.strip()}\n"
    old = re.compile(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    new = old.sub(lambda found: f"{section}\n", whole) if old.search(whole) else f"{whole.rstrip()}\n\n{section}"
    FILE.write_text(new.rstrip() + "\n", encoding="utf-8")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown, the first column to the left and the others, which are numbers, to the right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def spread(values: Sequence[float], form: str) -> str:
    """The median with the least and the most."""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"
