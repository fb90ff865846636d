"""What `train plan` says of memory is what a step takes.

The forecast counts the storages of tensors that have no memory. The measurement is another source: real steps are made, and
torch.profiler records each call of PyTorch's own allocator, with the bytes that are allocated after it. So it has what kernels
allocate within (copies in another layout, for instance), which no operation's result shows, and it has whatever is freed later
than the forecast believes. What the allocator is not asked for, such as oneDNN's compiled kernels, is in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet50

from tests.conftest import ROOT
from tests.plan.nets import GPT, NextToken, Pictures, pictures, sentences
from train.config import Config
from train.data.loader import Batch
from train.learner import Learner
from train.parallel.engine import LanePass
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode
from train.plan.modes import Line, needs
from train.plan.trace import trace
from train.run import load_config

WITHIN = 0.1

Case = tuple[Callable[[], nn.Module], Any, Callable[[int], Batch]]
RESNET: Case = (lambda: resnet50(num_classes=10), Pictures(), pictures)
SMALL_GPT: Case = (GPT, NextToken(), sentences)


def accelerator(precision: str) -> Accelerator:
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, mixed_precision=precision)


def config(*settings: str) -> Config:
    return load_config([ROOT / "configs" / "digits.yaml"], ["optimizer.clip_norm=1", *settings])


def forecast(case: Case, chosen: Config, *, samples: int, lanes: int, precision: str = "no") -> int:
    build, task, make = case
    runs = accelerator(precision)
    traces = [trace(build, task, make(number), runs, chosen, lanes=lanes) for number in (samples, samples // 2)]
    strict = chosen.run.determinism == "strict"
    return needs("single", 1, lanes, Line(*traces), samples, strict=strict).total()


def measured(case: Case, chosen: Config, *, samples: int, lanes: int, precision: str = "no") -> int:
    """The most bytes that were allocated at one time in two steps, from the making of the model on."""
    build, task, make = case
    runs = accelerator(precision)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        shared = Lanes(lanes)
        batches = [make(samples) for _ in shared.local]
        learner = Learner(chosen, Mode("single", "cpu", ()), Launch(), build(), task, shared, runs, batches[0])
        learner.engine.model.train()
        for _ in range(2):
            passes = [LanePass(lane, batch, samples) for lane, batch in zip(shared.local, batches, strict=True)]
            learner.engine.forward_backward(passes, lanes * samples, lambda lane: None)
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


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_gpt_takes_what_was_forecast(precision: str, lanes: int) -> None:
    chosen = config("ema.decay=0.9")
    expected = forecast(SMALL_GPT, chosen, samples=8, lanes=lanes, precision=precision)
    assert expected == pytest.approx(measured(SMALL_GPT, chosen, samples=8, lanes=lanes, precision=precision), rel=WITHIN)


def test_each_doubling_of_the_lanes_keeps_one_more_sum_of_gradients() -> None:
    """The sums of a model that is large beside its activations: 8 lanes keep three, and under `fast` none."""
    wide: Case = (lambda: GPT(width=256, depth=2), NextToken(), sentences)
    for determinism in ("strict", "fast"):
        chosen = config(f"run.determinism={determinism}")
        expected = forecast(wide, chosen, samples=2, lanes=8)
        assert expected == pytest.approx(measured(wide, chosen, samples=2, lanes=8), rel=WITHIN)


@pytest.mark.slow
def test_resnet50_takes_what_was_forecast() -> None:
    for lanes in (1, 2):
        expected = forecast(RESNET, config(), samples=4, lanes=lanes)
        assert expected == pytest.approx(measured(RESNET, config(), samples=4, lanes=lanes), rel=WITHIN)
