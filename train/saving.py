"""Saving beside the training: a checkpoint is copied off the device, and a thread writes it while the steps go on."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from train import checkpoint
from train.checkpoint import Snapshot
from train.errors import LockstepError
from train.parallel.processes import Processes


class Saver:
    """Writes one checkpoint at a time. The main process writes alone, or all of them their parts."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self.folder, self.keep = folder, keep
        self.processes = processes.apart()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: Future[None] | None = None

    def save(self, snapshot: Snapshot, best: int | None) -> None:
        """Start to write, after the one before; raises what became of that."""
        self.finish()
        self._pending = self._thread.submit(self._write, snapshot, best)

    def check(self) -> None:
        """Raise what has become of the checkpoint that was being written, if it has ended."""
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def settle(self) -> None:
        """Wait for it on the way out, where something else is to be told."""
        with contextlib.suppress(LockstepError, RuntimeError):
            self.finish()

    def _write(self, snapshot: Snapshot, best: int | None) -> None:
        if snapshot.in_parts:
            checkpoint.write_parts(self.folder, snapshot, self.processes)
        elif self.processes.main:
            checkpoint.write(self.folder, snapshot)
        if self.processes.main:
            checkpoint.prune(self.folder, snapshot.step, self.keep, best)
