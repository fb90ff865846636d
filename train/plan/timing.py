"""How long a step takes, and how much memory, on the device that is here: some steps of one process, with weights and all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from train.config import Config
from train.data.loader import Batch
from train.errors import RunError
from train.job import repeated
from train.learner import Learner
from train.parallel.engine import LanePass
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode
from train.plan.trace import Build
from train.seeds import seed_lane
from train.tasks import Task

if TYPE_CHECKING:
    from accelerate import Accelerator

_SECONDS = 10.0  # of measured steps; one is made in any case


@dataclass(frozen=True)
class Timing:
    """Seconds of one lane's passes and of an update; `peak` is in bytes, None on a CPU."""

    micro_batch: int
    lane: float
    update: float
    peak: int | None

    def rate(self, samples: int, devices: int) -> float:
        """Samples a second at most, that is where devices never wait for each other, at so many a step."""
        return samples / (samples / devices / self.micro_batch * self.lane + self.update)


def largest_that_runs(
    build: Build, task: Task, sample: Batch, accelerator: Accelerator, config: Config, launch: Launch,
    micro_batch: int, say: Callable[[str], None],
) -> Timing:  # fmt: skip
    """The timing of a step of `config.batch.size` samples in lanes of `micro_batch`, or of a half, a quarter, ... of it where the
    device has not the memory. RunError where even one sample is too much."""
    while True:
        lanes = config.batch.size // micro_batch
        say(f"timing steps of {lanes} x {micro_batch} samples ...")
        try:
            return timed(build, task, repeated(sample, micro_batch), accelerator, config, launch, lanes)
        except torch.OutOfMemoryError as error:
            if micro_batch == 1:
                raise RunError(f"not even a lane of one sample fits this device: {error}") from error
        finally:
            accelerator.free_memory()
            gc.collect()  # what it has let go of
        micro_batch = next(half for half in range(micro_batch // 2, 0, -1) if config.batch.size % half == 0)


def timed(build: Build, task: Task, blank: Batch, accelerator: Accelerator, config: Config, launch: Launch, lanes: int) -> Timing:
    """Of whole steps on a GPU; of at most two lanes a step on a CPU, where nothing but time depends on their number."""
    device, size = accelerator.device, len(next(iter(blank.fields.values())))
    shared = Lanes(lanes if device.type == "cuda" else min(lanes, 2))
    learner = Learner(config, Mode("single", device.type, ()), launch, build(), task, shared, accelerator, blank)
    learner.engine.model.train()
    passes = [LanePass(lane, blank.to(device), size) for lane in shared.local]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def one_step() -> tuple[float, float]:
        began = _now(device)
        learner.engine.forward_backward(passes, size * shared.count, lambda lane: seed_lane(config.run.seed, 0, lane))
        passed = _now(device)
        learner.clip()
        learner.update()
        return (passed - began) / shared.count, _now(device) - passed

    one_step()  # which sets up
    steps, end = [one_step()], time.perf_counter() + _SECONDS
    while time.perf_counter() < end and len(steps) < 20:
        steps.append(one_step())
    lane_seconds, update_seconds = zip(*steps, strict=True)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Timing(size, median(lane_seconds), median(update_seconds), peak)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
