"""`train bench input`: how fast the samples come with so many data workers, and whether a step would wait for them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from rich import box
from rich.table import Table

from train.batches import training_batches
from train.bench import loop, tables
from train.bench.conditions import conditions
from train.bench.loop import Loop, open_job, settings_of
from train.data.loader import Batch
from train.errors import RunError
from train.job import Job

NOTES = (
    "Medians over the rounds, with the least and the most. The step is measured with its data in memory. The wait is the time "
    "by which the input of a step takes longer than a step, and without workers all of it, since then a step does it itself.",
    "Where the step computes on the CPU too, workers and step take each other's time: `train bench step` measures them together.",
)


def measure(words: Sequence[str], *, workers: Sequence[int], rounds: int, steps: int, as_json: bool) -> None:
    """Take turns and show what they have taken."""
    with tempfile.TemporaryDirectory() as scratch:
        config = settings_of(words, Path(scratch))
        job = open_job(config)
        counts = workers or worker_counts(job)
        step = Loop(replace(job, workers=0))
        computing: list[float] = []
        times: dict[int, list[float]] = {count: [] for count in counts}
        for number in range(rounds):
            loop.told(number, rounds)
            computing.append(step.seconds(steps, in_memory=True))
            for count in counts if number % 2 == 0 else counts[::-1]:
                times[count].append(seconds(replace(job, workers=count), steps))
    facts = conditions(["0"] if job.accelerator.device.type == "cuda" else [])
    if as_json:
        figures = {"step_seconds": computing, "input_seconds": times, "samples": config.batch.size}
        print(json.dumps({**figures, "conditions": facts, "config": config.model_dump(mode="json")}, indent=2))
        return
    one = median(computing)
    table = Table("workers", "samples/s", "ms a step", f"wait beside a step of {1000 * one:.2f} ms", box=box.SIMPLE)
    for count, values in sorted(times.items()):
        rates = [config.batch.size / value for value in values]
        delay = wait(median(values), one, count)
        table.add_row(
            f"{count}{' (data.workers)' if count == job.workers else ''}",
            tables.spread("{:,.1f}", config.batch.size / median(values), rates),
            f"{1000 * median(values):.2f}",
            f"{1000 * delay:.2f} ms, {delay / (one + delay):.1%} of the time",
        )
    described = [line for line in job.describe() if line.startswith(("data: ", "model: ", "batch: "))]
    tables.show(table, [*described, *(f"{name}: {fact}" for name, fact in facts.items()), *NOTES])


def worker_counts(job: Job) -> list[int]:
    """None, powers of two up to the cores, and what the configuration says."""
    cores = len(os.sched_getaffinity(0))
    return sorted({0, job.workers, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)})


def seconds(job: Job, steps: int) -> float:
    """For the batches of a step, after those that are made before the first one is asked for."""
    batches, lanes = training_batches(job, 0), len(job.lanes.local)
    _take(batches, lanes + job.workers * job.config.data.prefetch)
    began = time.perf_counter()
    _take(batches, steps * lanes)
    return (time.perf_counter() - began) / steps


def _take(batches: Iterator[Batch], count: int) -> None:
    for batch in islice(batches, count):
        if batch.failure:
            raise RunError(batch.failure)


def wait(coming: float, step: float, workers: int) -> float:
    """Of a step whose batches take `coming` seconds."""
    return max(0.0, coming - step) if workers else coming
