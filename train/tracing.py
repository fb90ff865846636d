"""A look inside some steps: what each thread and device did, when, and for how long."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule


def last_steps(path: Path, steps: int, left: int) -> profile:
    """A running profiler, to be stepped after each of the `left` steps of a run, that writes a Chrome trace of the last ones.

    The step before them warms it up. The threads that communicate are traced too, although they are older than it.
    """
    traced = max(1, min(steps, left - 1))
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
        schedule=schedule(wait=max(0, left - traced - 1), warmup=1, active=traced, repeat=1),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return profiler
