"""What a step really takes, by another source than the forecast.

The forecast counts the storages of tensors that have no memory. Here real steps are made, and torch.profiler records each call of
PyTorch's own allocator, with the bytes that are allocated after it. So it has what kernels allocate within (copies in another
layout, for instance), which no operation's result shows, and it has whatever is freed later than the forecast believes. What the
allocator is not asked for, such as oneDNN's compiled kernels, is in neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import multiprocessing, nn
from torch.profiler import ProfilerActivity, profile

from tests.conftest import ROOT, free_port
from train.config import Config
from train.data.loader import Batch
from train.learner import Learner
from train.parallel.engine import LanePass
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode
from train.run import load_config

Case = tuple[Callable[[], nn.Module], Any, Callable[[int], Batch]]


def accelerator(precision: str = "no") -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, mixed_precision=precision)


def config(*settings: str) -> Config:
    return load_config([ROOT / "configs" / "digits.yaml"], ["optimizer.clip_norm=1", *settings])


def measured(case: Case, chosen: Config, lanes: Lanes, *, samples: int, precision: str = "no", mode: str = "single") -> int:
    """The most bytes that this process had allocated at one time in two steps, from the making of the model on."""
    build, task, make = case
    runs = accelerator(precision)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        batches = [make(samples) for _ in lanes.local]
        learner = Learner(chosen, Mode(mode, "cpu", ()), Launch(), build(), task, lanes, runs, batches[0])
        learner.engine.model.train()
        for _ in range(2):
            passes = [LanePass(lane, batch, samples) for lane, batch in zip(lanes.local, batches, strict=True)]
            learner.engine.forward_backward(passes, lanes.count * samples, lambda lane: None)
            learner.clip()
            learner.update()
    allocated = allocations(profiled)
    first, change = allocated[0]
    return max(total for total, _ in allocated) - (first - change)


def allocations(profiled: profile) -> list[tuple[int, int]]:
    """In their order: the bytes that are allocated after each call of the allocator, and by how many it has changed them."""
    found = []
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    return [(total, change) for _, total, change in sorted(found)]


def measured_by_two(case: Case, settings: tuple[str, ...], mode: str, *, lanes: int, samples: int) -> list[int]:
    """The same of each of two processes."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    arguments = (free_port(), case, settings, mode, lanes, samples, found)
    multiprocessing.spawn(_one_of_two, arguments, nprocs=2)
    return [most for _, most in sorted(found.get() for _ in range(2))]


def _one_of_two(
    rank: int, port: int, case: Case, settings: tuple[str, ...], mode: str, lanes: int, samples: int, found: Any
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if mode == "fsdp":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    torch.set_num_threads(1)
    shared = Lanes(lanes) if mode == "pipeline" else Lanes(lanes, rank, 2, interleaved=mode == "fsdp")
    found.put((rank, measured(case, config(*settings), shared, samples=samples, mode=mode)))
