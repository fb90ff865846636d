"""What an examination gives: a line about one thing, and what to do where it is not as it should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import click

State = Literal["ok", "note", "warning", "failed"]  # failed: the project cannot run here, or not on the GPU that is there

_COLOURS: dict[State, str] = {"ok": "green", "note": "blue", "warning": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Finding:
    """`subject` is the word for the line, `found` what there is, `mend` what to do about it."""

    subject: str
    state: State
    found: str
    mend: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, "ok", found)


def broken(
    subject: str, error: Exception, mend: str = "this should not be: tell the project's people, with this line"
) -> Finding:
    """What could not be looked at."""
    reason = str(error).strip().partition("\n")[0]
    return Finding(subject, "failed", f"{type(error).__name__}: {reason}", mend)


def show(title: str, findings: Iterable[Finding]) -> None:
    """A section of the screen; colours only where stdout is a terminal."""
    click.secho(title, bold=True)
    for finding in findings:
        state = click.style(f"{finding.state:<8}", fg=_COLOURS[finding.state])
        click.echo(f"  {state} {finding.subject:<18} {finding.found}")
        if finding.mend:
            click.echo(f"{'':30}-> {finding.mend}")


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
