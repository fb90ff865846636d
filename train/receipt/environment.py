"""What a run's numbers may depend on beside its configuration and its data."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from train import driver
from train.bench.conditions import cpu

ROOT = Path(__file__).parent.parent.parent
LONGEST_DIFF = 200_000  # characters
# Never the whole environment, which holds secrets.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def environment(launch: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """All of it; `launch` is what the launcher and Accelerate decided."""
    return {
        "code": code(ROOT),
        "versions": versions(),
        "devices": devices(),
        "cpu": {"model": cpu(), "kernels": torch.backends.cpu.get_cpu_capability(), "threads": threads},
        "launch": dict(launch),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "image": os.environ.get("LOCKSTEP_IMAGE") or None,
    }


def code(root: Path) -> dict[str, Any]:
    """The commit and what was changed since, untracked files of train/ included; `digest` is of all Python files in train/."""
    commit = _git(root, "rev-parse", "HEAD")
    diff = _diff(root) if commit else None
    whole = diff is None or len(diff) <= LONGEST_DIFF
    return {
        "commit": commit.strip() if commit else os.environ.get("LOCKSTEP_COMMIT") or None,
        "diff": diff if whole else None,
        "diff_left_out": not whole,
        "digest": digest(root),
    }


def digest(root: Path) -> str:
    """Of the names and the contents of the Python files that train."""
    found = hashlib.sha256()
    for path in sorted((root / "train").rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _diff(root: Path) -> str:
    """From the commit to the files as they are. New files are shown through an index of our own, so that nothing is staged."""
    index = Path((_git(root, "rev-parse", "--path-format=absolute", "--git-path", "index") or "").strip())
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "index"
        if index.is_file():
            copy.write_bytes(index.read_bytes())
        variables = {"GIT_INDEX_FILE": str(copy)}
        _git(root, "add", "--intent-to-add", "train", variables=variables)
        return _git(root, "diff", "--binary", "HEAD", "--", "train", variables=variables) or ""


def _git(root: Path, *words: str, variables: Mapping[str, str] | None = None) -> str | None:
    """What git prints; None where it fails, as without a repository."""
    try:
        answer = subprocess.run(
            ["git", *words], cwd=root, env={**os.environ, **(variables or {})}, capture_output=True, text=True
        )
    except OSError:
        return None
    return answer.stdout if answer.returncode == 0 else None


def versions() -> dict[str, Any]:
    lock = ROOT / "requirements.lock"
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
        "packages": dict(sorted((found.name, found.version) for found in distributions())),
    }


def devices() -> dict[str, Any]:
    found = driver.find()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {"driver": found.version if found else None, "gpus": [torch.cuda.get_device_name(number) for number in gpus]}
