"""`train bench step`: what a step costs here, and what input, logging and other settings change in it."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from train.bench import loop, tables
from train.bench.conditions import conditions
from train.bench.loop import Apart, settings_of
from train.config import Config
from train.errors import UsageError

COMPUTE, INPUT, LOGGED = "data in memory", "with input", "with input, and logged"
NOTES = (
    "Medians over the rounds, with the least and the most; times data in memory is of the same round. A step is logged each time "
    "in the third row; a run does so every tracking.every steps.",
    "Below are other settings over the configuration, with data in memory, each in a process of its own. Memory is its peak: of "
    "the device, or of the process on a CPU.",
    "Where others are busy on the CPU cores, the threads of run.determinism=fast, which takes all, wait for each other many "
    "times as long as they compute.",
)


def measure(words: Sequence[str], *, variants: Sequence[str], rounds: int, steps: int, as_json: bool) -> None:
    """Take turns and show what they have taken. A variant is `key=value` settings, as a shell would part them."""
    with tempfile.TemporaryDirectory() as scratch:
        config = settings_of(words, Path(scratch) / "own")
        others = _others(words, variants or [_other_level(config)], Path(scratch))
        with ExitStack() as stack:
            own = stack.enter_context(closing(Apart(config)))
            loops = {name: stack.enter_context(closing(Apart(other))) for name, other in others.items()}
            own.seconds(1, in_memory=True, logged=True)
            turns: dict[str, Callable[[], float]] = {
                COMPUTE: partial(own.seconds, steps, in_memory=True),
                INPUT: partial(own.seconds, steps, in_memory=False),
                LOGGED: partial(own.seconds, steps, in_memory=False, logged=True),
                **{name: partial(other.seconds, steps, in_memory=True) for name, other in loops.items()},
            }
            times: dict[str, list[float]] = {name: [] for name in turns}
            for number in range(rounds):
                loop.told(number, rounds)
                for name in list(turns) if number % 2 == 0 else list(turns)[::-1]:
                    times[name].append(turns[name]())
            memory = {COMPUTE: own.memory_gib(), **{name: other.memory_gib() for name, other in loops.items()}}
            description, device = own.describe(), own.device()
    figures = {
        "seconds": times,
        "samples_per_second": {name: config.batch.size / median(values) for name, values in times.items()},
        "memory_gib": memory,
        "times_data_in_memory": {name: ratios(values, times[COMPUTE]) for name, values in times.items()},
    }
    facts = conditions(["0"] if device == "cuda" else [])
    if as_json:
        print(json.dumps({**figures, "conditions": facts, "config": config.model_dump(mode="json")}, indent=2))
    else:
        level = config.run.determinism
        _show(figures, level, [f"{name}: {fact}" for name, fact in facts.items()], description)


def _other_level(config: Config) -> str:
    return f"run.determinism={'fast' if config.run.determinism == 'strict' else 'strict'}"


def _others(words: Sequence[str], variants: Sequence[str], scratch: Path) -> dict[str, Config]:
    """The configuration with each variant's settings over it. UsageError tells all that cannot be."""
    made: dict[str, Config] = {}
    problems = []
    for number, variant in enumerate(variants):
        try:
            made[variant] = settings_of([*words, *shlex.split(variant)], scratch / str(number))
        except (UsageError, ValueError) as error:  # of the settings, or of shlex
            problems.append(f"--with {variant}: {error}")
    if problems:
        raise UsageError("\n".join(problems))
    return made


def ratios(times: Sequence[float], to: Sequence[float]) -> list[float]:
    """In each round."""
    return [one / other for one, other in zip(times, to, strict=True)]


def _show(figures: dict[str, Any], level: str, facts: list[str], description: list[str]) -> None:
    table = Table("a step", "ms", "samples/s", f"times {COMPUTE}", "memory, GiB", box=box.SIMPLE)
    for name, values in figures["seconds"].items():
        relative, memory = figures["times_data_in_memory"][name], figures["memory_gib"].get(name)
        table.add_row(
            f"{name}, {level}" if name in (COMPUTE, INPUT, LOGGED) else name,
            tables.spread("{:.2f}", 1000 * median(values), [1000 * value for value in values]),
            f"{figures['samples_per_second'][name]:,.1f}",
            tables.spread("{:.3f}", median(relative), relative),
            f"{memory:.2f}" if memory else "",
        )
    told = [line for line in description if line.startswith(("model: ", "device: ", "batch: "))]
    tables.show(table, [*told, *facts, *NOTES])
