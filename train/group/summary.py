"""What the runs of a group have come to: seeds.json, seeds.svg and a table."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from train.config import Config
from train.drawing import axes_of
from train.errors import UsageError
from train.run_folder import RunFolder

_LOSS = "train/loss"  # of the last step


def write(folder: RunFolder, metric: str, runs: Sequence[Config], say: Callable[[str], None]) -> None:
    """Write the files, and show the table on stderr, from what the finished runs have left in their folders. The plot is of
    `metric`, or of the training loss where that was not measured."""
    lines = {run.run.seed: _lines(run.folder / "metrics.jsonl") for run in runs}
    results = [_result(run, lines[run.run.seed]) for run in runs]
    metrics = spreads([result["metrics"] for result in results])
    folder.write("seeds.json", json.dumps({"seeds": results, "metrics": metrics}, indent=2) + "\n")
    Console(stderr=True, width=None if sys.stderr.isatty() else 130).print(_table(results, metrics))
    shown = metric if all(any(metric in line for line in told) for told in lines.values()) else _LOSS
    try:
        _plot(folder.path / "seeds.svg", shown, {seed: curve(told, shown) for seed, told in lines.items()})
    except UsageError as error:
        say(f"no plot: {error}")


def spreads(metrics: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Of each metric that all runs have: mean, deviation, least and most."""
    shared = [name for name in metrics[0] if all(name in one for one in metrics)]
    return {name: _spread([one[name] for one in metrics]) for name in shared}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": fmean(values), "std": deviation(values), "min": min(values), "max": max(values)}


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); NaN where a value is not finite, which `statistics` fails at."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def curve(lines: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Step -> value of a metric."""
    return {line["step"]: float(line[name]) for line in lines if name in line}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _result(run: Config, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    metrics = dict(summary["metrics"])
    if losses := curve(lines, _LOSS):
        metrics[_LOSS] = losses[max(losses)]
    return {
        "seed": run.run.seed,
        "folder": str(run.folder),
        **{key: summary[key] for key in ("step", "weights_sha256")},
        "metrics": metrics,
    }


def _table(results: Sequence[Mapping[str, Any]], metrics: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("seed", *metrics):
        table.add_column(name, justify="right", overflow="fold")
    for result in results:
        table.add_row(str(result["seed"]), *(f"{result['metrics'][name]:.4f}" for name in metrics))
    table.add_section()
    for figure in ("mean", "std", "min", "max"):
        table.add_row(figure, *(f"{spread[figure]:.4f}" for spread in metrics.values()))
    return table


def _plot(path: Path, name: str, curves: Mapping[int, Mapping[int, float]]) -> None:
    """Each run's metric over its steps, and the mean of all with the standard deviation at the steps that all have."""
    shared = sorted(set.intersection(*(set(values) for values in curves.values())))
    spread = [_spread([values[step] for values in curves.values()]) for step in shared]
    low, high = ([one["mean"] + sign * one["std"] for one in spread] for sign in (-1, 1))
    with axes_of(path) as axes:
        for seed, values in curves.items():
            axes.plot(list(values), list(values.values()), linewidth=0.8, alpha=0.7, label=f"seed {seed}")
        axes.plot(shared, [one["mean"] for one in spread], color="black", marker=".", label="mean")
        axes.fill_between(shared, low, high, color="black", alpha=0.15, linewidth=0, label="standard deviation")
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
