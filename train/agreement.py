"""What machines that train together must have in common, since each reads its own settings and its own copy of the data."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.config import MOVABLE, Config, differences
from train.errors import RunError, UsageError
from train.parallel.processes import Processes

# May differ from machine to machine.
_OWN = ("run.output_dir", *MOVABLE, "data.validation_path", "data.workers", "data.prefetch")


def same_settings(config: Config, processes: Processes) -> None:
    """Refuse processes that were started with other settings than the main one."""
    theirs = Config.model_validate(processes.share(config.model_dump(mode="json")))
    different = [
        f"{difference.key}: {difference.new}, and {difference.old} on the main process"
        for difference in differences(theirs, config)
        if difference.key not in _OWN
    ]
    _refuse(UsageError, "was started with other settings", different, processes)


def same_data(identity: Mapping[str, Any], processes: Processes) -> None:
    """Refuse processes whose data, or precision, are not the main one's."""
    theirs = processes.share(identity)
    different = [
        f"{key}: {str(value)[:200]}, and {str(theirs[key])[:200]} on the main process"
        for key, value in identity.items()
        if value is not None and theirs[key] is not None and value != theirs[key]
    ]
    _refuse(RunError, "has other data or another precision", different, processes)


def same_folder(folder: Path, processes: Processes) -> None:
    """Refuse machines with a folder each where every process is to write its part of a checkpoint into one."""
    probe = folder / f".seen-{processes.share(secrets.token_hex(8))}"
    processes.on_main(probe.touch)
    seen = processes.gather(probe.exists())[:, 0]
    if processes.main:
        probe.unlink()
    if not seen.all():
        raise RunError(
            f"process {seen.argmin()} does not see {folder} of the main process. In this mode each process writes its part of a "
            "checkpoint: give a run.output_dir that the machines share.",
            everywhere=True,
        )


def _refuse(kind: type[UsageError] | type[RunError], what: str, different: list[str], processes: Processes) -> None:
    everyone = processes.gather_objects(different)
    if odd := next((rank for rank, lines in enumerate(everyone) if lines), None):
        raise kind("\n".join([f"process {odd} {what}; all must have the same:", *everyone[odd]]), everywhere=True)
