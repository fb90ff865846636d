"""torch.profiler over some steps of a run, which leaves a trace of each process and a summary of the main one's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from train.errors import UsageError
from train.profiling import traces
from train.profiling.labels import PREFIX

_TOP = 8
_NO_OPERATORS = (PREFIX, "ProfilerStep", "enumerate(DataLoader)", "Optimizer.", "gloo:", "nccl:")  # what others label


def check(steps: tuple[int, int], done: int, total: int) -> None:
    """UsageError for steps that are not all to come. The first one of a start, in which the workers start, is none of them."""
    first, last = steps
    if not done + 1 < first <= last <= total:
        raise UsageError(
            f"--profile {first}..{last}: give the first and the last step, of those from {done + 2} to {total}: the run has "
            f"{total} steps, {f'{done} of them are done, ' if done else ''}and the first of a start only warms up"
        )


class Profiler:
    """To be told of the end of each step. The step before the first one warms it up, and the threads that communicate are
    traced too, although they are older than it."""

    def __init__(self, steps: tuple[int, int], path: Path, done: int) -> None:
        self.steps, self.path = steps, path
        self._summary: list[str] = []
        first, last = steps

        def action(number: int) -> ProfilerAction:
            step = done + 1 + number
            if not first - 1 <= step <= last:
                return ProfilerAction.NONE
            if step == first - 1:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD if step < last else ProfilerAction.RECORD_AND_SAVE

        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=action,
            on_trace_ready=self._write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    def step(self) -> list[str] | None:
        """After each step; after the last one that is profiled the summary, a line each."""
        self._profile.step()
        return self._summary or None

    def stop(self) -> list[str]:
        """What has become of the profile of a run that ends before it is whole."""
        self._profile.stop()
        left = f"; {self.path} has those until then" if self._summary else ""
        return [f"no profile of steps {self.steps[0]} to {self.steps[1]}: the run has ended{left}"]

    def _write(self, made: profile) -> None:
        made.export_chrome_trace(str(self.path))
        events = traces.events(self.path)
        parts, count = traces.parts(events), traces.step_count(events)
        step = sum(parts.values())
        self._summary = [
            f"profile of steps {self.steps[0]} to {self.steps[1]}: {step / 1000:.2f} ms a step, slower than without it",
            *(_row(part, time, step) for part, time in parts.items()),
            *_operators(made, count, step, gpu=False),
            *(_operators(made, count, step, gpu=True) if torch.cuda.is_available() else []),
            f"trace of each thread, for Perfetto or chrome://tracing: {self.path}",
        ]


def _operators(made: profile, count: int, step: float, *, gpu: bool) -> Sequence[str]:
    """The operators that take most time of their own, without that of the operators in them."""
    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    found = [one for one in made.key_averages() if one.device_type == DeviceType.CPU and not one.key.startswith(_NO_OPERATORS)]
    slowest = sorted((one for one in found if getattr(one, own)), key=lambda one: getattr(one, own), reverse=True)[:_TOP]
    rows = [_row(f"{one.key[:48]} x {one.count / count:.3g}", getattr(one, own) / count, step) for one in slowest]
    return [f"slowest operators on the {'GPU' if gpu else 'CPU'}, with their calls a step:", *rows] if rows else []


def _row(name: str, microseconds: float, step: float) -> str:
    return f"  {name:<58}{microseconds / 1000:>9.2f} ms {microseconds / step:>6.1%}"
