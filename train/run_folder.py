"""The folder of a run: who may write there, and the files that say how it went."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from train.errors import RunError
from train.weights import save_tensors


class RunFolder:
    """outputs/<run>, held by one live run at a time. Only the main process opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (path / ".lock").open("w")
        except OSError as error:
            mend = f"make it writable for uid {os.getuid()}, or " if isinstance(error, PermissionError) else ""
            raise RunError(f"{path} cannot be made or written ({error.strerror}); {mend}give another run.output_dir") from error
        try:
            # Unlike flock's, this lock is not inherited by data workers, which may outlive a killed run by seconds.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{path} is in use by another run that is alive. Wait for it, stop it, or give another run.name or "
                "run.output_dir."
            ) from None

    def write(self, name: str, text: str) -> None:
        """Write a file whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_model(self, weights: Mapping[str, Tensor]) -> None:
        """model/model.safetensors, whole or not at all."""
        target = self.path / "model" / "model.safetensors"
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_name(".model.safetensors.tmp")
        save_tensors(temporary, weights)
        temporary.replace(target)

    def write_summary(self, facts: Mapping[str, Any]) -> None:
        self.write("summary.json", json.dumps(facts, indent=2) + "\n")

    def finished_at(self) -> int | None:
        """The step at which this run has finished before, None when it has not."""
        try:
            summary = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary["step"] if summary.get("status") == "finished" else None
