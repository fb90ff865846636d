"""`train bench scaling`: the same run in several modes that take turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import signal
import sys
from datetime import datetime
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch

from train import tasks
from train.bench import report
from train.bench.conditions import conditions
from train.bench.setups import Files, Setup, default_modes, gpu_ids, read_modes
from train.bench.turns import Turn, launch, total_steps
from train.config import Config
from train.data.plan import epoch_length
from train.errors import RunError, UsageError
from train.run import read_settings


class Plan(NamedTuple):
    """What was asked for on the command line."""

    settings: tuple[str, ...]
    modes: str | None
    precision: str
    rounds: int
    steps: int
    warmup: int
    output: Path | None


def measure(plan: Plan) -> None:
    """Check everything, take turns, and leave and show the results; those of whole rounds stay when it is stopped."""
    config, _ = read_settings(plan.settings)
    if config.seeds:
        raise UsageError("seeds: the modes are compared by one run each; leave seeds out")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and config.parallel.device != "cpu" else 0
    names = plan.modes.split(",") if plan.modes else default_modes(config, gpus)
    setups, lanes = read_modes(names, config, gpus, plan.precision)
    samples = _samples(config)
    folder = plan.output or config.run.output_dir / f"bench-scaling-{config.run.name}-{datetime.now():%Y%m%d-%H%M%S}"
    files = _prepare(folder, config, setups)
    words = _overrides(plan, lanes)
    facts = conditions(gpu_ids(min(gpus, max(setup.devices for setup in setups)))) | {
        "turns": f"{plan.rounds} of each mode in alternating order, each of {plan.steps} steps after {plan.warmup} to warm up",
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the turn under way is stopped with this
    turns: dict[str, list[Turn]] = {setup.name: [] for setup in setups}
    for number in range(plan.rounds):
        for setup in setups if number % 2 == 0 else setups[::-1]:
            done = launch(setup, files[setup.name], words, folder, warmup=plan.warmup, steps=plan.steps)
            turns[setup.name].append(done)
            rate = f"{done.samples_per_second:,.1f} samples/s"
            print(f"round {number + 1}/{plan.rounds}  {setup.name}  {rate}", file=sys.stderr, flush=True)
        results = report.Results(config, samples, setups, turns, facts)
        report.write(folder, results)
    report.show(results)
    report.plot(folder, results)
    print(folder)


def _overrides(plan: Plan, lanes: int) -> list[str]:
    """The same numbers a step in all modes, and nothing beside the steps."""
    return [
        f"steps={total_steps(plan.warmup, plan.steps)}",
        f"batch.lanes={lanes}",
        f"tracking.every={gcd(plan.warmup, plan.steps)}",
        "tracking.wandb=off",
        "tracking.tensorboard=false",
        "evaluate.every=0",
        "checkpoint.every=0",
        "run.resume_from=null",
    ]


def _samples(config: Config) -> int | None:
    """How many samples the whole configuration trains on; None where the data do not tell."""
    if config.steps:
        return config.steps * config.batch.size
    length = epoch_length(tasks.find(config.task).open(config, torch.device("cpu"), lambda note: None).sources.train)
    return (config.epochs or 0) * length if length else None


def _prepare(folder: Path, config: Config, setups: list[Setup]) -> dict[str, Files]:
    """The folder with what each setup is launched with."""
    try:
        (folder / "setups").mkdir(parents=True, exist_ok=True)
        return {setup.name: setup.write(folder / "setups", place, config) for place, setup in enumerate(setups, 1)}
    except OSError as error:
        raise RunError(f"{folder} cannot be made or written ({error.strerror}); give another --output") from error
