"""The driver and the GPUs."""

from __future__ import annotations

import torch

from train import driver
from train.doctor.findings import Finding, gibibytes, ok

_BUSY = 0.1  # of a card's memory taken by others


def gpu() -> list[Finding]:
    found = driver.find()
    if found is None:
        return [Finding("driver", "note", "no NVIDIA driver: training runs on the CPU", _NO_DRIVER)]
    if wrong := driver.problem(found, torch.version.cuda):
        return [Finding("driver", "failed", str(found), wrong)]
    lines = [ok("driver", f"{found}; PyTorch is built for CUDA {torch.version.cuda}; {driver.minimum() or 'any'} is the oldest")]
    if not torch.cuda.is_available():
        return [*lines, Finding("GPU", "failed", "the driver is there, and PyTorch sees no GPU", _HIDDEN)]
    return lines + [card(number) for number in range(torch.cuda.device_count())]


_NO_DRIVER = (
    "to use a GPU install NVIDIA's driver; nvidia-smi then shows it. In a container it comes from the host: docker run "
    "--gpus all, or a service with a GPU reservation"
)
_HIDDEN = "CUDA_VISIBLE_DEVICES may hide it, or another program hold it exclusively; nvidia-smi shows both"


def card(number: int) -> Finding:
    """A GPU with its memory, and whether this PyTorch has kernels for it and others leave it free."""
    facts = torch.cuda.get_device_properties(number)
    capability = f"sm_{facts.major}{facts.minor}"
    free, total = torch.cuda.mem_get_info(number)
    text = f"{facts.name} ({capability}), {gibibytes(free)} of {gibibytes(total)} free"
    # Machine code of a major version runs on its later minor ones.
    kernels = [name for name in torch.cuda.get_arch_list() if name.startswith(f"sm_{facts.major}")]
    if not any(int(name.strip("sm_af")) <= facts.major * 10 + facts.minor for name in kernels):
        mend = f"this PyTorch has kernels for {', '.join(torch.cuda.get_arch_list())} only: take a build that has them"
        return Finding(f"GPU {number}", "failed", text, mend)
    if free < (1 - _BUSY) * total:
        return Finding(f"GPU {number}", "warning", text, "another program holds its memory; nvidia-smi names it")
    return ok(f"GPU {number}", text)
