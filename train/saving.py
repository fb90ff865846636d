"""Saving beside the training: a checkpoint is copied off the device, and a thread writes it while the steps go on."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from train import checkpoint
from train.checkpoint import Snapshot
from train.errors import LockstepError
from train.parallel import machines
from train.parallel.processes import Processes
from train.weights import Spare, spare, weights_sha256

_LAST_SECONDS = 20.0  # for a save that is under way when another machine is gone


class Saved(NamedTuple):
    """A checkpoint that is on the disk; the hash of its weights on the main process."""

    step: int
    weights_sha256: str | None


class Saver:
    """Writes one checkpoint at a time. The main process writes alone, or all of them their parts."""

    def __init__(self, folder: Path, keep: int, processes: Processes, device: torch.device) -> None:
        self.folder, self.keep = folder, keep
        self.processes = processes.apart()
        # A new thread would take the first GPU for its own.
        choose = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save", initializer=choose)
        self._pending: Future[Saved] | None = None
        self._last: Snapshot | None = None
        machines.before_end(partial(self.settle, _LAST_SECONDS))

    def save(self, snapshot: Snapshot, best: int | None) -> None:
        """Start to write, after the one before; raises what became of that."""
        self.finish()
        self._pending, self._last = self._thread.submit(self._write, snapshot, best), snapshot

    def spare(self) -> Spare:
        """The memory of the last snapshot, which is written, for the next one."""
        return spare(tensor for part in (self._last.tensors.values() if self._last else ()) for tensor in part.values())

    @property
    def failed(self) -> bool:
        """Whether the checkpoint that was being written has come to nothing."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def finish(self, seconds: float | None = None) -> Saved | None:
        """Wait for it, so long at the most, and give what is written, or raise what has become of it."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result(seconds)

    def settle(self, seconds: float | None = None) -> None:
        """Wait for it on the way out, where something else is to be told."""
        with contextlib.suppress(LockstepError, RuntimeError, TimeoutError):
            self.finish(seconds)

    def _write(self, snapshot: Snapshot, best: int | None) -> Saved:
        if snapshot.in_parts:
            path = checkpoint.write_parts(self.folder, snapshot, self.processes)
        elif self.processes.main:
            path = checkpoint.write(self.folder, snapshot)
        if not self.processes.main:
            return Saved(snapshot.step, None)
        checkpoint.prune(self.folder, snapshot.step, self.keep, best)
        whole = checkpoint.read(path) if snapshot.in_parts else snapshot
        return Saved(snapshot.step, weights_sha256(whole.final))
