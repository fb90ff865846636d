"""How much of a device a configuration uses, beside a plain PyTorch loop on the same device in the same run.

    python benchmarks/card.py [CONFIG.yaml ...] [key=value ...] [--rounds 5] [--steps 10]
    python benchmarks/card.py configs/imagenet_resnet50.yaml batch.size=256 batch.lanes=1 speed.precision=bf16 \
        speed.channels_last=true speed.compile=model

The plain loop does what timm's and nanoGPT's do with the same model, optimizer, precision, memory format and compiler: autocast,
cuDNN's autotuning, one backward pass a micro-batch, an update, and no more. All have one step's batches in memory. They take
turns in shuffled order. Operations are counted on the plain model (2 for a multiplication with its addition, backward too); the
matrix rate is that of a large product in the same precision, measured in the same run. On a GPU the peak of the strict
loop, which is taken before there are others, stands beside what `train plan` forecasts.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch
from torch.utils.flop_counter import FlopCounterMode

from train import determinism
from train.batches import training_batches
from train.bench.conditions import conditions
from train.bench.loop import Loop, open_job, settings_of, told
from train.config import Config
from train.doctor.speed import matmul_rate
from train.job import Job
from train.optim import build_optimizer


def at(config: Config, level: Literal["strict", "fast"]) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"determinism": level})})


class PlainLoop:
    """Gradient accumulation over the micro-batches of a step."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.accelerator.device
        self.model = job.model.to(self.device).train()
        self.batches = list(islice(training_batches(job, 0), job.lanes.count))
        self.weight = sum(job.task.weight(batch) for batch in self.batches)
        with FlopCounterMode(display=False) as counter:
            self._passes()
        self.operations = counter.get_total_flops()
        self.optimizer = build_optimizer(job.config.optimizer, self.model)
        if job.started.compiler != "no":
            self.model.compile(backend=job.started.compiler)

    def _passes(self) -> None:
        for kept in self.batches:
            batch = kept.to(self.device)
            with self.job.accelerator.autocast():
                loss = self.job.task.loss(self.model(self.job.task.inputs(batch)), batch) / self.weight
            loss.backward()

    def seconds(self, steps: int) -> float:
        """Of a step, in a turn of so many after one more."""
        determinism.apply(self.job.config.run, 1)
        for step in range(steps + 1):
            if step == 1:
                began = self._now()
            self.optimizer.zero_grad()
            self._passes()
            self.optimizer.step()
        return (self._now() - began) / steps

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def forecast(settings: Sequence[str]) -> float:
    """GiB on one device, from `train plan`."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "train", "plan", *settings, "--devices", "1", "--quick", "--json"]
    planned = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | {"PYTHONPATH": str(root)})
    single = next(mode for mode in json.loads(planned.stdout)["modes"] if mode["name"] == "single")
    return float(single["peak"]) / 2**30


@click.command(help=__doc__)
@click.argument("settings", nargs=-1)
@click.option("--rounds", default=5, show_default=True, help="Turns of each loop.")
@click.option("--steps", default=10, show_default=True, help="Measured steps of a turn.")
def main(settings: tuple[str, ...], rounds: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        config = settings_of(settings, Path(scratch))
        strict = Loop(open_job(at(config, "strict")))
        job, device = strict.job, strict.job.accelerator.device
        strict.seconds(1, in_memory=True)
        memory = strict.memory_gib()
        fast, plain = Loop(open_job(at(config, "fast"))), PlainLoop(open_job(at(config, "fast")))
        turns: dict[str, Callable[[], float]] = {
            "plain loop": lambda: plain.seconds(steps),
            "Lockstep, fast": lambda: fast.seconds(steps, in_memory=True),
            "Lockstep, strict": lambda: strict.seconds(steps, in_memory=True),
        }
        for turn in turns.values():
            turn()  # what is compiled and tuned at first
        times: dict[str, list[float]] = {name: [] for name in turns}
        order = random.Random(0)
        for number in range(rounds):
            told(number, rounds)
            for name in order.sample(list(turns), len(turns)):
                times[name].append(turns[name]())
    precision = config.speed.precision
    if precision in ("auto", "fp8"):
        precision = {"no": "fp32", "fp8": "bf16"}.get(job.accelerator.mixed_precision, job.accelerator.mixed_precision)
    matrix = matmul_rate(device, precision)
    command = " ".join(["python benchmarks/card.py", *settings, f"--rounds {rounds} --steps {steps}"])
    facts = conditions(["0"] if device.type == "cuda" else [])
    lines = [
        f"- `{command}`, medians of the rounds, least and most",
        *(f"- {name}: {fact}" for name, fact in facts.items()),
        *(f"- {line}" for line in job.describe() if line.startswith(("model: ", "device: ", "batch: "))),
        f"- {plain.operations / 1e9:.4g} GFLOP a step; a large product in {precision}: {matrix / 1e12:.4g} TFLOP/s",
    ]
    if device.type == "cuda":
        lines.append(f"- peak memory {memory:.2f} GiB; `train plan` says {forecast(settings):.2f} GiB")
    text = "\n".join(lines) + "\n\n" + compared(times, config.batch.size, plain.operations, matrix)
    click.echo(text)
    results.record(f"One card: {config.run.name}", text)


def compared(times: dict[str, list[float]], batch: int, operations: float, matrix: float) -> str:
    rows = []
    for name, seconds in times.items():
        ratios = [its / own for its, own in zip(times["plain loop"], seconds, strict=True)]
        rate = operations / median(seconds)
        rows.append(
            [
                name,
                f"{batch / median(seconds):,.1f} ({batch / max(seconds):,.1f} to {batch / min(seconds):,.1f})",
                f"{rate / 1e12:.4g}",
                f"{rate / matrix:.1%}",
                f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            ]
        )
    return results.table(["loop", "samples/s", "TFLOP/s", "of the matrix rate", "rate / the plain loop's"], rows)


if __name__ == "__main__":
    main()
