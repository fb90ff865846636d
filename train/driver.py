"""Whether the NVIDIA driver of this machine runs the CUDA that PyTorch was built with."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_IMAGE = Path(__file__).parent.parent / "Dockerfile"  # the one place that names the oldest driver
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Driver:
    version: str | None  # 580.95.05; None where the kernel does not tell
    cuda: tuple[int, int]  # the newest that it runs, a forward-compatibility package counted in

    def __str__(self) -> str:
        return f"{self.version or 'of unknown version'}, for CUDA up to {self.cuda[0]}.{self.cuda[1]}"


def find() -> Driver | None:
    """The driver; None where there is none. Does not start CUDA."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except OSError:
        return None
    text = _KERNEL_MODULE.read_text() if _KERNEL_MODULE.exists() else ""
    return Driver(version(text), (number.value // 1000, number.value % 1000 // 10))


def version(text: str) -> str | None:
    """The driver's version in what its kernel module says of itself."""
    found = re.search(r"Kernel Module.*?\s(\d{3,}(?:\.\d+)+)\s", text)
    return found[1] if found else None


def minimum() -> str | None:
    """The oldest driver for the pinned CUDA, as the Dockerfile says; None where the code was installed without it."""
    found = re.search(r"^ARG MINIMUM_DRIVER=(\S+)$", _IMAGE.read_text(), re.MULTILINE) if _IMAGE.exists() else None
    return found[1] if found else None


def problem(driver: Driver | None, built_for: str | None, *, works: bool = True) -> str | None:
    """What is wrong with this driver for a PyTorch that was built for that CUDA, and the way out.

    A driver runs every CUDA of its own major version and of those before (NVIDIA's minor version compatibility). One that
    claims to, by a forward-compatibility package, and does not `work` is too old all the same.
    """
    if driver is None or built_for is None:
        return None
    least = minimum()
    too_old = not works and driver.version is not None and least is not None and _numbers(driver.version) < _numbers(least)
    if driver.cuda[0] >= int(built_for.partition(".")[0]) and not too_old:
        return None
    needed = f"{least} or newer" if least else "a newer one"
    major, minor = built_for.split(".")[:2]
    return (
        f"the NVIDIA driver is {driver}, and this PyTorch needs CUDA {built_for}: install driver {needed}. On a data-centre card "
        f"whose driver has to stay, NVIDIA's forward-compatibility package does too (cuda-compat-{major}-{minor}; in a container "
        "also set NVIDIA_DISABLE_REQUIRE=1). To train on the CPU say so: accelerate launch --cpu"
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
