"""What `train bench scaling` has measured, as a table, a plot and raw numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from train.bench import tables
from train.bench.setups import Setup
from train.bench.turns import Turn
from train.config import Config
from train.drawing import axes_of
from train.errors import UsageError

NOTES = (
    "Medians over the turns, with the least and the most. Speed-up is to the first mode in the same round; efficiency is "
    "speed-up by devices.",
    "Data wait and memory are those of the first process; memory is its peak: of its first GPU, or of the process on a CPU.",
    "Communication is a share of a step's time, the wait for the other processes included; alone is the part beside which the "
    "same device computes nothing. On CPUs the rest takes computing time too.",
    "The whole config is training on all its samples at this rate, without evaluation and checkpoints.",
)


@dataclass(frozen=True)
class Results:
    config: Config
    samples: int | None  # of the whole configuration
    setups: Sequence[Setup]
    turns: dict[str, list[Turn]]
    conditions: dict[str, str]

    def speedups(self, name: str) -> list[float]:
        """To the first setup, in each round."""
        first = self.turns[self.setups[0].name]
        return [own.samples_per_second / one.samples_per_second for own, one in zip(self.turns[name], first, strict=True)]

    def figures(self, setup: Setup) -> dict[str, Any]:
        """The medians of a setup."""
        turns = self.turns[setup.name]
        rate, speedup = median(turn.samples_per_second for turn in turns), median(self.speedups(setup.name))
        talks = [turn.communication for turn in turns if turn.communication]
        return {
            "samples_per_second": rate,
            "speedup": speedup,
            "efficiency": speedup * self.setups[0].devices / setup.devices,
            "data_wait": median(turn.data_wait for turn in turns),
            "communication": median(talk.share for talk in talks) if talks else None,
            "communication_exposed": median(talk.exposed for talk in talks) if talks else None,
            "memory_gib": median(turn.memory_gib for turn in turns),
            "hours": self.samples / rate / 3600 if self.samples else None,
        }

    def remarks(self) -> list[str]:
        """The conditions, and whether all runs were the same one."""
        says = {name: turns[0].says for name, turns in self.turns.items()}
        model = next(line for line in says[self.setups[0].name] if line.startswith("model: "))
        others = median(turn.others for turns in self.turns.values() for turn in turns)
        return [
            self.weights(),
            *(f"{name}: {fact}" for name, fact in self.conditions.items()),
            f"other work: it kept {others:.1f} CPU cores busy meanwhile",
            model,
            *(
                f"{name}: {'; '.join(line for line in lines if line.startswith(('device: ', 'batch: ')))}"
                for name, lines in says.items()
            ),
        ]

    def weights(self) -> str:
        hashes = {setup.name: {turn.weights_sha256 for turn in self.turns[setup.name]} for setup in self.setups}
        every = set().union(*hashes.values())
        if len(every) == 1:
            return f"weights: all turns in all modes ended with the same bits, sha256 {every.pop()}"
        differing = [f"{name} {', '.join(sorted(digest[:8] for digest in found))}" for name, found in hashes.items()]
        return f"weights: not the same bits in all turns: {'; '.join(differing)}"


def table(results: Results, style: box.Box) -> Table:
    """A column a mode."""
    made = Table("", box=style)
    for setup in results.setups:
        made.add_column(setup.name, overflow="fold")
    columns = [_column(results, setup) for setup in results.setups]
    for name in columns[0]:
        made.add_row(name, *(column[name] for column in columns))
    return made


def _column(results: Results, setup: Setup) -> dict[str, str]:
    own = results.figures(setup)
    rates = [turn.samples_per_second for turn in results.turns[setup.name]]
    talk = own["communication"]
    return {
        "mode": setup.mode.name,
        "devices": str(setup.devices),
        "samples/s": tables.spread("{:,.1f}", own["samples_per_second"], rates),
        "speed-up": tables.spread("{:.2f}", own["speedup"], results.speedups(setup.name)),
        "efficiency": f"{own['efficiency']:.0%}",
        "data wait": f"{own['data_wait']:.1%}",
        "communication": "-" if talk is None else f"{talk:.1%} ({own['communication_exposed']:.1%} alone)",
        "peak memory": f"{own['memory_gib']:.2f} GiB",
        "whole config": "unknown" if own["hours"] is None else f"{own['hours']:.3g} hours",
    }


def show(results: Results) -> None:
    tables.show(table(results, box.SIMPLE), (*results.remarks(), *NOTES))


def write(folder: Path, results: Results) -> None:
    """scaling.md and scaling.json."""
    with (folder / "scaling.md").open("w", encoding="utf-8") as file:
        console = Console(file=file, width=400)
        with console.capture() as captured:
            console.print(table(results, box.MARKDOWN))
        lines = [line for line in captured.get().splitlines() if line.strip()]
        file.write("\n".join([*lines, "", *(f"- {line}" for line in (*results.remarks(), *NOTES)), ""]))
    setups = [
        {
            "name": setup.name,
            "mode": setup.mode.name,
            "processes": setup.processes,
            "devices": setup.devices,
            "accelerate": setup.accelerate,
            "median": results.figures(setup),
            "turns": [asdict(turn) for turn in results.turns[setup.name]],
        }
        for setup in results.setups
    ]
    facts = {
        "conditions": results.conditions,
        "samples": results.samples,
        "setups": setups,
        "config": results.config.model_dump(mode="json"),
    }
    (folder / "scaling.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def plot(folder: Path, results: Results) -> None:
    """scaling.svg, where matplotlib is there to draw it."""
    try:
        _plot(folder / "scaling.svg", results)
    except UsageError as error:
        print(f"no plot: {error}", file=sys.stderr)


def _plot(path: Path, results: Results) -> None:
    """Each mode's speed-up beside the ideal one."""
    first, names = results.setups[0], []
    with axes_of(path, 1.5 + 0.7 * len(results.setups)) as axes:
        for place, setup in enumerate(results.setups):
            own, spread = results.figures(setup), results.speedups(setup.name)
            errors = [[own["speedup"] - min(spread)], [max(spread) - own["speedup"]]]
            axes.barh(place, own["speedup"], height=0.5, xerr=errors, color="C0", capsize=4)
            axes.text(0.03, place, f"{own['speedup']:.2f}x", va="center", color="white")
            axes.plot(setup.devices / first.devices, place, "|", color="black", markersize=32)
            hours = "" if own["hours"] is None else f", {own['hours']:.3g} hours"
            names.append(f"{setup.name}\n{own['samples_per_second']:,.1f} samples/s{hours}")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set(
            xlabel=f"speed-up to {first.name}; | is the ideal", title=f"{results.config.run.name}, {results.config.model.name}"
        )
