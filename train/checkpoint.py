"""Checkpoints as transactions: a folder under its final name is always whole, and damage done later is noticed.

    <run>/checkpoints/step-00000120/  model.safetensors, optimizer.safetensors, ..., state.json, checksums.json

A checkpoint is written in a hidden folder beside, flushed to the disk and renamed, so that a kill at any moment leaves
the ones before it as they were. `checksums.json` is written last, from the flushed files as they are read back: it
fixes their bytes at that moment, so whatever changes, shortens or removes them afterwards (a bad disk, a partial copy,
a hand) is found before they are used. Tensors are safetensors and the rest is JSON: nothing that is read can run code.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from train.errors import RunError
from train.weights import load_tensors, save_tensors

_CHECKSUMS = "checksums.json"
_STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.(step-\d+)\.(tmp|old)-\d+")


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: `tensors` by file stem and name, as `weights.cpu_copies` makes them; `state` in JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Write `snapshot` into `folder` as a whole, in place of an older one of the same step, and give its path.

    Raises RunError when the disk refuses; what was there before is then as it was.
    """
    final = folder / f"step-{snapshot.step:08d}"
    temporary = _hidden(final, "tmp")
    try:
        folder.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _fill(temporary, snapshot)
        _put_in_place(temporary, final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(_refusal(error, final, _size(snapshot))) from error
        raise
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
    stems = [name.removesuffix(".safetensors") for name in names if name.endswith(".safetensors")]
    return Snapshot(step, {stem: load_tensors(path / f"{stem}.safetensors") for stem in stems}, state)


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


def _fill(folder: Path, snapshot: Snapshot) -> None:
    state = json.dumps({"step": snapshot.step, "state": snapshot.state}, indent=1, default=_plain)
    (folder / _STATE).write_text(state, encoding="utf-8")
    for stem, tensors in snapshot.tensors.items():
        save_tensors(folder / f"{stem}.safetensors", tensors)
    checksums = {}
    for path in sorted(folder.iterdir()):
        _flush(path)
        checksums[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
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


def _size(snapshot: Snapshot) -> int:
    return sum(tensor.nbytes for tensors in snapshot.tensors.values() for tensor in tensors.values())


def _refusal(error: OSError, final: Path, needed: int) -> str:
    there = next(parent for parent in final.parents if parent.is_dir())
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            mend = "Make room there, or choose another run.output_dir or a lower checkpoint.keep"
        case errno.EFBIG:
            mend = "Raise the limit on a file's size (ulimit -f)"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            mend = "Make the folder writable, or choose another run.output_dir"
        case errno.ENOENT | errno.ENOTDIR | errno.EEXIST:
            mend = "The run's folder was removed or replaced while the run was using it: put it back"
        case _:
            mend = "Check the disk"
    return (
        f"cannot save {final}: {error.strerror}.\n"
        f"It needs {needed / 1e6:,.1f} MB; {shutil.disk_usage(there).free / 1e6:,.1f} MB are free in {there}. "
        "Older checkpoints are as they were.\n"
        f"{mend}; then type the same command again."
    )
