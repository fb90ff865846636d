"""What a person sees while a run goes on: one line that changes on a terminal, plain lines anywhere else.

Everything goes to stderr, so that stdout can be piped. No thread: the line is redrawn inside `update`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.live import Live

REDRAW_SECONDS = 0.25

# What of the trainer's values is shown, the most telling first: a narrow terminal cuts the end.
_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "loss_spread": "± {:.4f}".format,  # the standard deviation, where there are several runs
    "lr": "lr {:.3g}".format,
    "samples_per_second": "{:,.0f} samples/s".format,
    "data_wait": "data wait {:.0%}".format,  # seconds waiting for data / seconds
    "memory_gib": "memory {:.1f} GiB".format,
}


class Display(Protocol):
    """Where a run shows itself."""

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    def __init__(self, total_steps: int, start_step: int = 0) -> None:
        self._total_steps = total_steps
        self._step = start_step
        self._values: Mapping[str, float] = {}
        self._measured_from: tuple[float, int] | None = None  # (seconds, step) when the first step was done
        self._next_redraw = 0.0
        self._live = _open_live() if sys.stderr.isatty() else None

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """A step is done; `values` are given at those that are logged. Costs a microsecond when nothing is drawn."""
        now = time.monotonic()
        self._step = step
        if self._measured_from is None:
            self._measured_from = now, step  # the first step compiles and warms up: it says nothing of the others
        if values is not None:
            self._values = values
            if self._live is None:
                self.line(self._text(now))
        if self._live is not None and now >= self._next_redraw:
            self._next_redraw = now + REDRAW_SECONDS
            self._redraw(self._live, now)

    def line(self, text: str) -> None:
        """Print a message, above the changing line if there is one."""
        if self._live is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._redraw(self._live, time.monotonic())
            self._live.stop()
            self._live = None

    def _redraw(self, live: Live, now: float) -> None:
        from rich.text import Text

        live.update(Text(self._text(now), no_wrap=True, overflow="ellipsis"), refresh=True)

    def _text(self, now: float) -> str:
        parts = [f"step {self._step}/{self._total_steps}", f"{100 * self._step // self._total_steps}%"]
        since, first = self._measured_from or (now, self._step)
        if self._step > first:
            seconds = (now - since) / (self._step - first) * (self._total_steps - self._step)
            parts.append(f"ETA {timedelta(seconds=round(seconds))}")
        parts += [form(self._values[name]) for name, form in _FORMATS.items() if name in self._values]
        return "  ".join(parts)


def show_cursor() -> None:
    """Give a terminal back as it was, for an end that does not close the line."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # the line has taken over sys.stderr


def _open_live() -> Live | None:
    """A line on the terminal, or None where the terminal cannot rewrite a line."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    # Prints of others go above the line; a piped stdout is left alone.
    live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
    live.start()
    return live
