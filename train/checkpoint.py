"""Checkpoints as transactions: a folder under its final name is always whole, and damage done later is noticed.

    <run>/checkpoints/step-00000120/  model.safetensors, optimizer.safetensors, ..., state.json, checksums.json

Where each process has a part of the tensors, each writes its own, by torch.distributed.checkpoint: model/shard-....safetensors
and so on. Any number of processes reads either.

A checkpoint is written in a hidden folder beside, flushed to the disk and renamed, so that a kill at any moment leaves
the ones before it as they were. `checksums.json` is written last, from the flushed files as they are read back: it
fixes their bytes at that moment, so whatever changes, shortens or removes them afterwards (a bad disk, a partial copy,
a hand) is found before they are used. Tensors are safetensors and the rest is JSON: nothing that is read can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from train.disk import refusal
from train.errors import RunError
from train.weights import load_parts, load_tensors, save_tensors

if TYPE_CHECKING:
    from torch.distributed.checkpoint import CheckpointException

    from train.parallel.processes import Processes

_CHECKSUMS = "checksums.json"
_STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.(step-\d+)\.(tmp|old)-\d+")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: `tensors` by file stem and name, as `weights.cpu_copies` makes them, or as `weights.part_copies`
    does where they lie in parts on several processes; `state` in JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    in_parts: bool = False

    @property
    def final(self) -> dict[str, Tensor]:
        """The weights that the run is for: the averaged ones where there are any."""
        return self.tensors.get("ema") or self.tensors["model"]


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `snapshot` into `folder` as a whole, in place of an older one of the same step, and give its path.

    Raises RunError when the disk refuses; what was there before is then as it was.
    """
    final = folder / f"step-{snapshot.step:08d}"
    temporary = _hidden(final, "tmp")
    with _transaction(temporary, final, snapshot):
        _begin(temporary)
        for stem, tensors in snapshot.tensors.items():
            save_tensors(temporary / f"{stem}.safetensors", tensors)
        _seal(temporary, snapshot)
        _put_in_place(temporary, final)
    return final


def write_parts(folder: Path, snapshot: Snapshot, processes: Processes) -> Path:
    """The same by all processes, of which each writes its parts; they see one file system."""
    import torch.distributed.checkpoint as dcp

    final = folder / f"step-{snapshot.step:08d}"
    temporary: Path = processes.share(_hidden(final, "tmp"))

    def begin() -> None:
        with _transaction(temporary, final, snapshot):
            _begin(temporary)

    def finish() -> None:
        with _transaction(temporary, final, snapshot):
            _seal(temporary, snapshot)
            _put_in_place(temporary, final)

    processes.on_main(begin)
    for stem, tensors in snapshot.tensors.items():
        writer = dcp.HuggingFaceStorageWriter(str(temporary / stem), save_distributed=True)
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=processes.group)
        except dcp.CheckpointException as error:
            if processes.main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _part_refusal(error, final, snapshot) from error
    processes.on_main(finish)
    return final


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder` by step, ascending; whether they are undamaged is not looked at."""
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def latest(folder: Path) -> tuple[Path | None, dict[int, str]]:
    """The undamaged checkpoint with the highest step, and why each newer one was passed over, by step."""
    damaged: dict[int, str] = {}
    for step, path in reversed(steps(folder).items()):
        reason = damage(path)
        if reason is None:
            return path, damaged
        damaged[step] = reason
    return None, damaged


def damage(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path` (such as "model.safetensors: 1 byte short"), or None.

    Reads every byte of it.
    """
    try:
        checksums = json.loads((path / _CHECKSUMS).read_bytes())
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in checksums.items()}
    except FileNotFoundError:
        return f"{_CHECKSUMS} is missing"
    except OSError as error:
        return f"{_CHECKSUMS} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_CHECKSUMS} is garbled"
    if _STATE not in expected:
        return f"{_CHECKSUMS} does not list {_STATE}"
    reasons = (_file_damage(path / name, size, sha256) for name, (size, sha256) in expected.items())
    return next((reason for reason in reasons if reason), None)


def read(path: Path) -> Snapshot:
    """Load the checkpoint at `path`, which `latest` or `damage` has found whole.

    Raises RunError when a file is not what its name says; files that the checkpoint does not list are not opened.
    """
    try:
        names = json.loads((path / _CHECKSUMS).read_bytes())
        saved = json.loads((path / _STATE).read_bytes())
        step, state = int(saved["step"]), dict(saved["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is not a checkpoint of this program: {error}. Take another one.") from error
    stems = {Path(name).parts[0] for name in names if name.endswith(".safetensors")}
    files = {stem.removesuffix(".safetensors"): path / stem for stem in sorted(stems)}
    return Snapshot(step, {stem: (load_parts if file.is_dir() else load_tensors)(file) for stem, file in files.items()}, state)


def fingerprint(path: Path) -> str | None:
    """What tells this checkpoint from another of the same name; None where there is none."""
    try:
        return _sha256(path / _CHECKSUMS)
    except OSError:
        return None


def prune(folder: Path, written: int, keep: int, best: int | None) -> list[int]:
    """Remove all but the newest `keep` (at least 1) up to the step just `written`, and the `best`; give the removed.

    Steps beyond `written` are removed too: they are damaged or of a history that the run has left by resuming from
    before them, and would win over this one at the next resume.
    """
    found = steps(folder)
    kept = {*[step for step in found if step <= written][-keep:], written, best}
    removed = [step for step in found if step not in kept]
    for step in removed:
        _remove(found[step])
    return removed


def clean(folder: Path) -> list[str]:
    """Remove what killed saves have left and give the names. Only for the one process that owns the run's folder."""
    removed = []
    for path in sorted(folder.glob(".step-*")):
        if match := _LEFTOVER.fullmatch(path.name):
            final = folder / match[1]
            if match[2] == "old" and not final.exists():  # killed between the two renames of a replacement
                path.replace(final)
                continue
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                removed.append(path.name)
    return removed


@contextmanager
def _transaction(temporary: Path, final: Path, snapshot: Snapshot) -> Iterator[None]:
    """Leave nothing behind, and say why, where the disk refuses."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(refusal(error, final, _size(snapshot))) from error
        raise


def _begin(temporary: Path) -> None:
    temporary.parent.mkdir(exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()


def _seal(folder: Path, snapshot: Snapshot) -> None:
    """Write the state, flush everything to the disk, and fix what it is now."""
    state = json.dumps({"step": snapshot.step, "state": snapshot.state}, indent=1, default=_plain)
    (folder / _STATE).write_text(state, encoding="utf-8")
    checksums = {}
    for path in sorted(folder.rglob("*")):
        _flush(path)
        if path.is_file():
            checksums[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
    _flush(folder / _CHECKSUMS)
    _flush(folder)


def _plain(value: Any) -> Any:
    """A NumPy scalar as the Python number that it is."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a checkpoint's state holds JSON values, not {type(value).__name__}")


def _put_in_place(temporary: Path, final: Path) -> None:
    replaced = _hidden(final, "old")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.replace(replaced)  # a folder cannot be renamed onto another; `clean` undoes this if we die here
    temporary.replace(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove(path: Path) -> None:
    """Rename, then delete: a kill in the middle leaves no half checkpoint under a final name."""
    doomed = _hidden(path, "tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.replace(doomed)
    except OSError as error:
        raise RunError(f"cannot remove the old checkpoint {path}: {error.strerror}. Make its folder writable.") from error
    shutil.rmtree(doomed, ignore_errors=True)


def _hidden(final: Path, kind: str) -> Path:
    return final.parent / f".{final.name}.{kind}-{os.getpid()}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_damage(path: Path, size: int, sha256: str) -> str | None:
    try:
        difference = path.stat().st_size - size
        if difference:
            count = abs(difference)
            return f"{path.name}: {count} byte{'s' * (count > 1)} {'short' if difference < 0 else 'too long'}"
        return None if _sha256(path) == sha256 else f"{path.name}: its bytes have changed (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"


def _part_refusal(error: CheckpointException, final: Path, snapshot: Snapshot) -> RunError:
    """What the first process that could not write its parts has met."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if isinstance(cause, OSError) and cause.errno:
        return RunError(refusal(cause, final, _size(snapshot)), everywhere=True)
    return RunError(f"cannot save {final}: process {rank}: {type(cause).__name__}: {cause}", everywhere=True)


def _size(snapshot: Snapshot) -> int:
    return sum(tensor.nbytes for tensors in snapshot.tensors.values() for tensor in tensors.values())
