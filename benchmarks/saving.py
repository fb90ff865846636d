"""How long a save keeps the training waiting, beside a save that the training waits for to its end.

    python benchmarks/saving.py [--rounds 5] [--parameters 100] [--steps 20]

The same trainer saves in turns in both ways, a model of so many million parameters with AdamW's state, which is three times the
weights. Each save is followed by some steps; the table also has how much longer those take while it is written, on this machine's
cores, since the writing computes checksums beside them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from train.bench.loop import open_job
from train.journal import Journal
from train.run import load_config
from train.run_folder import RunFolder
from train.stopping import StopRequest
from train.trainer import Trainer


class Large(nn.Module):
    """Two matrices of `millions` of parameters together, for pictures of 8 x 8."""

    def __init__(self, classes: int, channels: int, millions: int) -> None:
        super().__init__()
        inputs = channels * 64
        width = round(millions * 1e6 / (inputs + classes))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores


def trainer(outputs: str, millions: int) -> Trainer:
    model = f"model={{name: 'benchmarks.saving:Large', millions: {millions}}}"
    settings = [model, "batch.size=8", "batch.lanes=1", "steps=1000000", "epochs=", "evaluate.every=0", "tracking.every=0"]
    settings += ["optimizer={name: AdamW, lr: 1e-4}", "checkpoint.keep=1", "data.workers=1", f"run.output_dir={outputs}"]
    config = load_config([Path(__file__).parent.parent / "configs" / "digits.yaml"], settings)
    job = open_job(config)
    made = Trainer(job, StopRequest())
    made.begin(Journal(job, RunFolder(config.folder), {}, None, evaluated=0, seconds=0.0))
    return made


def seconds(work: Callable[[], object], *, times: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.option("--parameters", default=100, show_default=True, help="Millions of parameters of the model.")
@click.option("--steps", default=20, show_default=True, help="Steps after a save.")
def main(rounds: int, parameters: int, steps: int) -> None:
    waits: dict[str, list[float]] = {"beside the training": [], "waited for": []}
    after: dict[str, list[float]] = {kind: [] for kind in waits}
    with tempfile.TemporaryDirectory() as outputs:
        trained = trainer(outputs, parameters)
        seconds(trained.train_step, times=3)
        for turn in range(2 * (rounds + 1)):  # the first round warms up
            kind = list(waits)[turn % 2]
            wait = seconds(trained.save)
            if kind == "waited for":
                wait += seconds(trained.settle_save)
            step = seconds(trained.train_step, times=steps)
            trained.settle_save()
            if turn >= 2:
                waits[kind].append(wait)
                after[kind].append(step)
        table = Table(
            "a save", "seconds that the training waits", "ms a step after it", title=f"{parameters} M parameters, AdamW"
        )
        for kind in waits:
            table.add_row(kind, f"{statistics.median(waits[kind]):.2f}", f"{1000 * statistics.median(after[kind]):.0f}")
        Console().print(table)
        ratios = [beside / blocking for beside, blocking in zip(*waits.values(), strict=True)]
        print(f"wait of a save beside the training, times one that is waited for: {statistics.median(ratios):.3f}")
        sys.stdout.flush()
    os._exit(0)  # the trainer's reading threads are left where they are


if __name__ == "__main__":
    main()
