"""What makes kernels give the same bits each time, and what makes them fast."""

from __future__ import annotations

import ctypes
import os

from train import config
from train.errors import UsageError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 32 * 2**20  # bytes, below which what is freed is kept: the most that malloc takes
_WORKSPACES = (":4096:8", ":16:8")  # the two that cuBLAS documents as deterministic


def prepare_environment(run: config.Run) -> None:
    """Set what must stand in the environment before CUDA starts or torch takes memory; called before torch is used."""
    _keep_freed_memory()
    if run.determinism == "strict":
        found = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if found not in _WORKSPACES:
            raise UsageError(
                f"CUBLAS_WORKSPACE_CONFIG={found} in the environment makes cuBLAS give other bits from run to run; "
                f"unset it, set it to {' or '.join(_WORKSPACES)}, or give run.determinism=fast"
            )


def _keep_freed_memory() -> None:
    """What a step frees stays for the next one, as to be given it anew takes the CPU a tenth of a step. The price is that the
    gaps between are not always filled: some MiB more at the peak. Large tensors go back, since theirs would be large too."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc has it
        mallopt(_M_MMAP_THRESHOLD, KEPT)
        mallopt(_M_TRIM_THRESHOLD, -1)


def apply(run: config.Run, processes: int) -> int:
    """Fix (strict) or free (fast) the kernels of this process and set its CPU threads, whose number is returned."""
    import torch

    strict = run.determinism == "strict"
    torch.use_deterministic_algorithms(strict)
    # Strict mode would also fill each new tensor with NaN, which helps to find kernels that read too much: 10 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set through the module's class
    torch.backends.cudnn.benchmark = not strict
    # The number of threads is part of how a CPU kernel brackets its sums, so that strict cannot leave it to the machine.
    automatic = 1 if strict else max(1, len(os.sched_getaffinity(0)) // processes)
    threads = run.threads if isinstance(run.threads, int) else automatic
    torch.set_num_threads(threads)
    return threads
