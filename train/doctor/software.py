"""Versions against the lock, and the libraries and programs that are there."""

from __future__ import annotations

import platform
import re
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from train.doctor.findings import Finding, ok

_LOCK = Path(__file__).parent.parent.parent / "requirements.lock"
_SHOWN = 4


def software() -> list[Finding]:
    return [python(), packages(_LOCK), communication(), compiler(), launcher()]


def python() -> Finding:
    found = f"Python {platform.python_version()}, PyTorch {torch.__version__}, built for {_built_for()}"
    return ok("Python", found)


def _built_for() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPUs"


def packages(lock: Path) -> Finding:
    """Whether what is installed is what the lock pins; what is not installed is not asked for."""
    if not lock.exists():
        return Finding("versions", "note", "no requirements.lock beside the code", "run from a checkout to compare")
    pins: dict[str, list[str]] = {}  # several where the lock tells platforms or Pythons apart
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE):
        pins.setdefault(name, []).append(pinned)
    there = {name: found for name in pins if (found := _version(name))}
    others = [f"{name} {found} (pinned: {', '.join(pins[name])})" for name, found in there.items() if found not in pins[name]]
    if others:
        rest = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        mend = "other versions may give other bits; make train sets .venv up from the lock"
        return Finding("versions", "warning", f"not as in the lock: {'; '.join(others[:_SHOWN])}{rest}", mend)
    return ok("versions", f"the {len(there)} packages here are those of the lock")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def communication() -> Finding:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    there = [*([f"NCCL {nccl}"] if nccl else []), *(["gloo"] if dist.is_gloo_available() else [])]
    if torch.cuda.is_available() and nccl is None:
        return Finding("communication", "warning", " and ".join(there), "several GPUs need a PyTorch that has NCCL")
    return ok("communication", " and ".join(there))


def compiler() -> Finding:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None] + ([] if header.exists() else [header.name])
    if missing:
        mend = "only torch.compile needs them: install gcc, g++ and python3-dev"
        return Finding("compiler", "note", f"missing: {', '.join(missing)}", mend)
    return ok("compiler", "gcc, g++ and Python's headers, for torch.compile")


def launcher() -> Finding:
    """The file that a bare `accelerate launch` reads, which is easily forgotten."""
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).exists():
        return ok("accelerate config", f"{default_config_file} decides the mode where no --config_file does")
    return ok("accelerate config", "no default file: `accelerate launch` decides the mode from its flags and the GPUs")
