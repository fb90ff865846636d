"""A driver that is too old for this PyTorch is named at the start, with the one that is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import HANG_SECONDS, ROOT, Launched
from train import driver
from train.driver import Driver

OLD, NEW = (12, 8), (13, 1)
MINIMUM = re.findall(r"^ARG MINIMUM_DRIVER=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[int], dict[str, str]]:
    """The environment of a machine whose driver runs CUDA up to a version: a library that answers so."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler to build a driver's library with")
    if torch.cuda.is_available():
        pytest.skip("there is a driver here")

    def make(version: int) -> dict[str, str]:
        source = tmp_path / "cuda.c"
        source.write_text(f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
        return {"LD_LIBRARY_PATH": str(tmp_path)}

    return make


def start(launch: Callable[..., Launched], environment: dict[str, str], tmp_path: Path, *settings: str) -> tuple[int, str]:
    short = ("steps=1", "evaluate.every=0", "data.workers=0", f"run.output_dir={tmp_path / 'outputs'}", *settings)
    launched = launch("python", "train/main.py", *short, env=environment)
    return launched.process.wait(HANG_SECONDS), launched.output


def test_an_old_driver_stops_the_run_with_one_line(
    launch: Callable[..., Launched], installed: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    code, said = start(launch, installed(12080), tmp_path)
    assert code == 2, said
    [line] = said.splitlines()
    assert line.startswith("error: the NVIDIA driver is of unknown version, for CUDA up to 12.8, and this PyTorch needs CUDA 13.")
    assert f"install driver {MINIMUM[0]} or newer" in line
    assert "forward-compatibility package" in line
    assert not (tmp_path / "outputs").exists()


def test_the_cpu_does_not_need_the_driver(
    launch: Callable[..., Launched], installed: Callable[[int], dict[str, str]], tmp_path: Path
) -> None:
    code, said = start(launch, installed(12080), tmp_path, "parallel.device=cpu")
    assert code == 0, said


def test_the_doctor_names_it_too(launch: Callable[..., Launched], installed: Callable[[int], dict[str, str]]) -> None:
    launched = launch("python", "-m", "train", "doctor", "--quick", env=installed(12080))
    assert launched.process.wait(HANG_SECONDS) == 1
    assert "failed   driver             of unknown version, for CUDA up to 12.8" in launched.output
    assert f"install driver {MINIMUM[0]} or newer" in launched.output


def test_a_driver_runs_its_own_cuda_and_older_ones() -> None:
    assert len(MINIMUM) == 1  # the one place
    assert driver.problem(Driver("570.86.15", OLD), "13.0")
    assert driver.problem(Driver("580.65.06", (13, 0)), "13.0") is None
    assert driver.problem(Driver("580.65.06", (13, 0)), "13.2") is None  # minor version compatibility
    assert driver.problem(Driver("590.10", NEW), "12.6") is None
    assert driver.problem(None, "13.0") is None
    # a forward-compatibility package on a card that cannot use it
    assert driver.problem(Driver("570.86.15", (13, 0)), "13.0", works=False)
    assert driver.problem(Driver("570.86.15", (13, 0)), "13.0", works=True) is None
    assert driver.problem(Driver(MINIMUM[0], (13, 0)), "13.0", works=False) is None
    assert driver.problem(Driver("570.86.15", OLD), None) is None  # a PyTorch for the CPU or for ROCm


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc 12.3.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build\nGCC version:  12.3.0\n",
    ],
)
def test_the_kernel_module_tells_the_version(text: str) -> None:
    assert driver.version(text) == "535.104.05"
