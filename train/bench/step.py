"""`train bench step`: what a step costs here, and what input, logging and strict determinism add to it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from train.bench import loop, tables
from train.bench.conditions import conditions
from train.bench.loop import Level, Loop, at, open_job, settings_of

COMPUTE, INPUT, LOGGED = "data in memory", "with input", "with input, and logged"
NOTES = (
    "Medians over the rounds, with the least and the most; times data in memory is of the same round. A step is logged each time "
    "in the third row; a run does so every tracking.every steps.",
    "Strict against fast is with data in memory. Fast takes all CPU cores: where others are busy on them its threads wait for "
    "each other, many times as long as they compute. cuBLAS keeps strict's workspace in both.",
)


def measure(words: Sequence[str], *, rounds: int, steps: int, as_json: bool) -> None:
    """Take turns and show what they have taken."""
    with tempfile.TemporaryDirectory() as scratch:
        config = settings_of(words, Path(scratch))
        level: Level = config.run.determinism
        other: Level = "fast" if level == "strict" else "strict"
        own = Loop(open_job(config))
        for in_memory in (True, False):
            own.seconds(1, in_memory=in_memory, logged=True)
        memory = own.memory_gib  # before there is another model
        otherwise = Loop(open_job(at(config, other)))
        otherwise.seconds(1, in_memory=True)
        turns: dict[str, Callable[[], float]] = {
            COMPUTE: lambda: own.seconds(steps, in_memory=True),
            INPUT: lambda: own.seconds(steps, in_memory=False),
            LOGGED: lambda: own.seconds(steps, in_memory=False, logged=True),
            other: lambda: otherwise.seconds(steps, in_memory=True),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(rounds):
            loop.told(number, rounds)
            for name in list(turns) if number % 2 == 0 else list(turns)[::-1]:
                times[name].append(turns[name]())
        description = own.job.describe()
    strict, fast = (times[COMPUTE], times[other]) if level == "strict" else (times[other], times[COMPUTE])
    figures = {
        "seconds": times,
        "samples_per_second": {name: config.batch.size / median(values) for name, values in times.items()},
        "memory_gib": memory,
        "strict_to_fast": ratios(strict, fast),
    }
    facts = conditions(["0"] if own.job.accelerator.device.type == "cuda" else [])
    if as_json:
        print(json.dumps({**figures, "conditions": facts, "config": config.model_dump(mode="json")}, indent=2))
    else:
        _show(figures, level, other, config.batch.size, [f"{name}: {fact}" for name, fact in facts.items()], description)


def ratios(times: Sequence[float], to: Sequence[float]) -> list[float]:
    """In each round."""
    return [one / other for one, other in zip(times, to, strict=True)]


def _show(figures: dict[str, Any], level: str, other: str, batch: int, facts: list[str], description: list[str]) -> None:
    table = Table("a step", "ms", "samples/s", f"times {COMPUTE}", box=box.SIMPLE)
    times = figures["seconds"]
    for name, values in times.items():
        relative = ratios(values, times[COMPUTE])
        table.add_row(
            f"{COMPUTE}, {name}" if name == other else f"{name}, {level}",
            tables.spread("{:.2f}", 1000 * median(values), [1000 * value for value in values]),
            f"{figures['samples_per_second'][name]:,.1f}",
            tables.spread("{:.3f}", median(relative), relative),
        )
    cost = figures["strict_to_fast"]
    tables.show(
        table,
        [
            f"strict takes {tables.spread('{:.3f}', median(cost), cost)} times as long as fast",
            f"peak memory: {figures['memory_gib']:.2f} GiB",
            *(line for line in description if line.startswith(("model: ", "device: ", "batch: "))),
            *facts,
            *NOTES,
        ],
    )
