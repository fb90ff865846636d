"""SIGTERM and SIGINT ask a run to save and stop at the next step boundary, wherever it is waiting."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1


class Interrupted(BaseException):
    """A stop was asked for while waiting for something that need not be waited for.

    No Exception: what is waited for, such as the decoding of a sample, may handle those as failures of its own.
    """


class StopRequest:
    """Remembers a signal; inside `waiting()` it ends the wait at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.training = False  # whether there is anything to save
        self._waiting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def __bool__(self) -> bool:
        return self.name is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround a wait; raises Interrupted in it, or before it when a signal has come already."""
        self._waiting = True
        try:
            if self:
                raise Interrupted
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.name is None
        self.name = self.name or signal.Signals(number).name
        if first:
            saving = "saving at the next step boundary, then stopping" if self.training else "stopping before any step is made"
            os.write(2, f"{self.name}: {saving}.\n".encode())
        if self._waiting:
            self._waiting = False
            raise Interrupted


def stop_with_the_launcher() -> None:
    """Ask for SIGTERM when the launcher dies: accelerate's does not pass signals on and would leave an orphan (Linux)."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        ask_for_signal_when_parent_dies(signal.SIGTERM)


def ask_for_signal_when_parent_dies(number: int) -> None:
    """Let the kernel send it (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), number)
