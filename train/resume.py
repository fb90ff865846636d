"""Going on with a run: which checkpoint, whether this configuration may, and putting everything back where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from train import checkpoint
from train.checkpoint import Snapshot
from train.config import Config, differences, recorded, verdict
from train.errors import RunError, UsageError
from train.parallel.processes import Processes


def find(config: Config, processes: Processes, say: Callable[[str], None]) -> Snapshot | None:
    """The newest undamaged checkpoint of this run, else of `run.resume_from`; None to start from nothing.

    The main process looks for it. All read it where they see the same one; where they do not, on machines without shared
    storage, the main process sends it. Says what was passed over and what has changed; raises UsageError when a change would
    make another run of it.
    """
    path = processes.share(processes.on_main(lambda: _search(config, say)))
    _refuse_newer_elsewhere(config.folder / "checkpoints", processes)
    if path is None:
        return None
    snapshot = _read(path, processes)
    compare(recorded(snapshot.state["config"]), config, say)
    say(f"resuming: {path}, step {snapshot.step}")
    return snapshot


def _read(path: Path, processes: Processes) -> Snapshot:
    seen = processes.gather_objects(checkpoint.fingerprint(path))
    if len(set(seen)) == 1:
        return checkpoint.read(path)
    shared: Snapshot = processes.broadcast(checkpoint.read(path) if processes.main else None)
    return shared


def _refuse_newer_elsewhere(folder: Path, processes: Processes) -> None:
    """The main process may be on another machine than last time, whose disk has nothing or less."""
    newest = processes.gather(max(checkpoint.steps(folder), default=0))[:, 0]
    if newest.max() > newest[0]:
        raise RunError(
            f"process {newest.argmax()} has a checkpoint of step {newest.max()} in {folder}, and the main process has "
            f"{f'one of step {newest[0]}' if newest[0] else 'none'}: the machines do not share this folder. Put the machine that "
            "has it first (--machine_rank 0), or copy it there, or remove it.",
            everywhere=True,
        )


def _search(config: Config, say: Callable[[str], None]) -> Path | None:
    own = config.folder / "checkpoints"
    for wreck in checkpoint.clean(own) if own.is_dir() else ():
        say(f"removed {wreck}, which a killed save has left")
    if (found := _newest(own, say)) is not None or (source := config.run.resume_from) is None:
        return found
    if source.name.startswith("step-"):
        if reason := checkpoint.damage(source):
            raise RunError(f"run.resume_from: {source} is damaged: {reason}")
        return source
    if (found := _newest(source / "checkpoints", say)) is None:
        raise RunError(f"run.resume_from: there is no whole checkpoint in {source / 'checkpoints'}")
    return found


def _newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    found, damaged = checkpoint.latest(folder) if folder.is_dir() else (None, {})
    for step, reason in damaged.items():
        say(f"checkpoint {step} is damaged ({reason}); going back to {found.name if found else 'the beginning'}")
    return found


def compare(old: Config, new: Config, say: Callable[[str], None]) -> None:
    """Say each changed key; refuse the changes that would make another run of it, all at once."""
    refused = []
    for difference in differences(old, new):
        change = f"{difference.key}: {difference.old} -> {difference.new}"
        if reason := verdict(difference, new):
            refused.append(f"{change}: refused, {reason}")
        elif difference.key not in ("run.resume_from", "run.allow_changes"):
            say(f"changed: {change} (allowed)")
    if refused:
        keys = ",".join(line.split(":")[0] for line in refused)
        raise UsageError(
            "the checkpoint was made under another configuration:\n"
            + "\n".join(refused)
            + "\nTake the old values back, give another run.name to start anew, or accept them with "
            + f"'run.allow_changes=[{keys}]'."
        )


def check(snapshot: Snapshot, now: dict[str, object]) -> None:
    """Refuse to go on with data that are not those of the checkpoint, where positions would name other samples, or in another
    precision, which would give other numbers. What was not known then or is not known now is not compared."""
    then = snapshot.state["identity"]
    known = {key: value for key, value in now.items() if value is not None and then[key] is not None}
    changed = [f"{key}: {_short(then[key])} -> {_short(value)}" for key, value in known.items() if then[key] != value]
    if changed:
        raise RunError(
            "the checkpoint was made otherwise:\n"
            + "\n".join(changed)
            + "\nPut the data and the precision of accelerate config back, or start anew under another run.name."
        )


def nothing_to_do(finished_at: int, snapshot: Snapshot | None, config: Config, total_steps: int) -> bool:
    """Whether the run that finished at that step has come to the end that this configuration asks for."""
    if snapshot is None:  # it kept no checkpoint
        return finished_at >= total_steps
    out_of_patience = 0 < config.evaluate.patience <= snapshot.state["best"]["since"]
    return finished_at == snapshot.step and (snapshot.step >= total_steps or out_of_patience)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
