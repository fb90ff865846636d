"""The driver and the GPUs."""

from __future__ import annotations

import os

import torch

from train import driver
from train.doctor.findings import Finding, broken, gibibytes, ok

_BUSY = 0.1  # of a card's memory taken by others
_NO_DRIVER = (
    "to use a GPU install NVIDIA's driver; nvidia-smi then shows it. In a container it comes from the host: docker run "
    "--gpus all, or a service with a GPU reservation"
)
_NO_START = (
    "nvidia-smi shows whether another program holds it exclusively; a reboot mends a driver that was updated or has slept, and "
    "boards with NVSwitch need NVIDIA's fabric manager"
)


def gpu() -> list[Finding]:
    if torch.version.hip:
        return cards() or [Finding("GPU", "note", "no AMD GPU is seen: training runs on the CPU", "rocminfo tells why")]
    found, given = driver.find(), os.environ.get("NVIDIA_VISIBLE_DEVICES")
    if found is None and given not in (None, "", "void", "none"):
        return [Finding("driver", "failed", f"none, in a container made for GPUs (NVIDIA_VISIBLE_DEVICES={given})", _NO_DRIVER)]
    if found is None:
        return [Finding("driver", "note", "no NVIDIA driver: training runs on the CPU", _NO_DRIVER)]
    if wrong := driver.problem(found, torch.version.cuda, works=torch.cuda.is_available()):
        return [Finding("driver", "failed", str(found), wrong)]
    text = f"{found}; PyTorch is built for CUDA {torch.version.cuda}; {driver.minimum() or 'any'} is the oldest that will do"
    if not torch.cuda.is_available():
        return [ok("driver", text), _why_none()]
    return [ok("driver", text), *cards()]


def _why_none() -> Finding:
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides it"
        return Finding("GPU", "failed", hidden, "unset it to use the GPUs")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return broken("GPU", error, _NO_START)
    return Finding("GPU", "failed", "the driver is there, and PyTorch sees no GPU", _NO_START)


def cards() -> list[Finding]:
    return [card(number) for number in range(torch.cuda.device_count())]


def card(number: int) -> Finding:
    """A GPU with its memory, and whether this PyTorch has kernels for it and others leave it free."""
    subject = f"GPU {number}"
    try:
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
    except RuntimeError as error:
        return broken(subject, error, _NO_START)
    text = f"{facts.name} (compute capability {facts.major}.{facts.minor}), {gibibytes(free)} of {gibibytes(total)} free"
    if torch.version.cuda and not has_kernels((facts.major, facts.minor), torch.cuda.get_arch_list()):
        mend = f"this PyTorch has kernels for {', '.join(torch.cuda.get_arch_list())} only: take a build that has them"
        return Finding(subject, "failed", text, mend)
    if free < (1 - _BUSY) * total:
        return Finding(subject, "warning", text, "another program holds its memory; nvidia-smi names it")
    return ok(subject, text)


def has_kernels(capability: tuple[int, int], built: list[str]) -> bool:
    """Machine code of a major version runs on its later minor ones, and PTX on all that is newer."""
    major, minor = capability
    for name in built:
        kind, _, digits = name.partition("_")
        number = int("".join(sign for sign in digits if sign.isdigit()))
        same = number // 10 == major and number % 10 <= minor
        if same or (kind == "compute" and number <= 10 * major + minor):
            return True
    return False
