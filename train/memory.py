"""What to say when memory has run out: when, what it held, and the setting with which a step needs less."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from train.errors import LockstepError, RunError
from train.parallel.lanes import sharing_problem
from train.weights import parts

if TYPE_CHECKING:
    from train.job import Job
    from train.trainer import Trainer

_RAN_OUT = re.compile(r"out of memory|DefaultCPUAllocator|CU\w+_STATUS_ALLOC_FAILED|bad_alloc")
_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@contextmanager
def explained(trainer: Trainer, *, evaluation: bool = False) -> Iterator[None]:
    """Turn running out of memory in the steps of a trainer, or in an evaluation, into a RunError that says what to do."""
    start = trainer.step
    try:
        yield
    except Exception as error:
        cause = _cause(error)
        if cause is None:
            raise
        where = f"the evaluation after step {trainer.step}" if evaluation else f"step {trainer.step + 1}"
        host = trainer.accelerator.device.type == "cpu" or isinstance(cause, MemoryError) or "CPUAllocator" in str(cause)
        lines = [
            f"out of memory in {where}: {_asked(str(cause))}",
            _of_host(trainer) if host else _of_gpu(trainer, str(cause)),
            *([] if evaluation else [_since(trainer.step - start, gpu=not host)]),
            _mend(trainer.job),
            *([_going_on(trainer)] if trainer.saved > 0 else []),
        ]
        raise RunError("\n".join(lines)) from error


def _cause(error: BaseException | None) -> BaseException | None:
    """That memory has run out, where this is behind an error, which a library may have wrapped."""
    if error is None or isinstance(error, LockstepError):
        return None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _RAN_OUT.search(str(error))):
        return error
    return _cause(error.__cause__)


def _asked(text: str) -> str:
    """How much was asked for, or the words of the error."""
    if found := _ASKED.search(text):
        return f"{_gib(float(found[1]) * _UNITS[found[2]])} GiB more were asked for"
    return next((line for line in text.splitlines() if _RAN_OUT.search(line)), "an object of Python or NumPy was to be made")


def _of_gpu(trainer: Trainer, text: str) -> str:
    number = re.search(r"\bGPU (\d+)", text)
    device = torch.device("cuda", int(number[1])) if number else trainer.accelerator.device
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, _ = torch.cuda.mem_get_info(device)
    return (
        f"{device} held {_gib(allocated)} GiB ({_parts(trainer, device, allocated)}); PyTorch had reserved {_gib(reserved)}, "
        f"{_gib(free)} GiB were free"
    )


def _of_host(trainer: Trainer) -> str:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    available = re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return (
        f"this process held {_gib(resident)} GiB ({_parts(trainer, torch.device('cpu'), resident)}); "
        + (f"{_gib(int(available[1]) * 1024)} GiB of the machine were available" if available else "")
        + ("" if limit == resource.RLIM_INFINITY else f", and `ulimit -v` gives the process {_gib(limit)} GiB of addresses")
    )


def _parts(trainer: Trainer, device: torch.device, held: int) -> str:
    """What of the bytes on a device is what, in GiB."""
    models = [trainer.plain, *([trainer.average.module] if trainer.average is not None else [])]
    partials = [partial for partial in trainer.engine.partials.partials if partial is not None]
    found = {
        "parameters": [tensor for model in models for tensor in (*model.parameters(), *model.buffers())],
        "gradients": [
            *(parameter.grad for parameter in trainer.plain.parameters() if parameter.grad is not None),
            *(tensor for partial in partials for tensor in partial),
        ],
        "optimizer state": [
            tensor
            for values in trainer.optimizer.optimizer.state.values()
            for tensor in values.values()
            if isinstance(tensor, Tensor)
        ],
    }
    sizes = {name: _size(tensors, device) for name, tensors in found.items()}
    sizes["rest"] = max(0, held - sum(sizes.values()))
    return ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())


def _size(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of those on a device; of a sharded one this process's part."""
    return sum(part.nbytes for tensor in tensors for part in parts(tensor) if part.device == device)


def _since(made: int, *, gpu: bool) -> str:
    if made < 2:  # the second is the first one with the optimizer's state
        return f"It was the {('first', 'second')[made]} step of this start, so that a step of this size does not fit."
    pieces = (
        " Or the free memory lies in pieces: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment helps then."
        if gpu
        else ""
    )
    return f"{made} steps had fitted, so that something has grown since: here, or in another program.{pieces}"


def _mend(job: Job) -> str:
    """More lanes, which are smaller; where there can be none, the other ways."""
    lanes, micro = job.lanes.count, job.micro_batch
    if (more := _more_lanes(job)) is None:
        return (
            f"A micro-batch of {micro} cannot be cut further by batch.lanes. Name the largest modules in speed.recompute, take "
            "speed.precision=bf16, a smaller model or pictures, or a mode that shares the model (configs/accelerate/README.md)."
        )
    return (
        f"Set batch.lanes={more} in place of {lanes}: the micro-batches that the device computes then have "
        f"{job.config.batch.size // more} in place of {micro} samples. batch.size, the samples of a step and the learning rate "
        "stay, so that the run learns alike. Its bits change: sums are bracketed otherwise, dropout draws other numbers, and "
        "BatchNorm sees smaller parts. With the largest modules in speed.recompute they stay. Parameters and optimizer "
        "state take what they took: FSDP shares them out, an optimizer of torchao keeps less, speed.offload takes it to the host."
    )


def _more_lanes(job: Job) -> int | None:
    """The next number of lanes that divides the batch and can be shared by the processes: mostly twice as many."""
    size, lanes = job.config.batch.size, job.lanes
    counts = (count for count in range(2 * lanes.count, size + 1) if size % count == 0)
    return next((count for count in counts if not sharing_problem(count, lanes.processes, interleaved=lanes.interleaved)), None)


def _going_on(trainer: Trainer) -> str:
    return (
        f"With run.resume_from={trainer.config.folder} and run.allow_changes=[batch.lanes] it goes on from step {trainer.saved}; "
        "without them it starts anew."
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
