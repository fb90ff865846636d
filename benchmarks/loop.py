"""What a step costs here, with and without the receipt, beside a bare PyTorch loop and Accelerate's as its documentation has it.

    python benchmarks/loop.py [CONFIG.yaml ...] [key=value ...] [--rounds 60] [--blocks 6] [--steps 1]

They train the same model on the same pictures with the same optimizer, at one lane, with the same number of workers and
CPU threads, and log the loss every ten steps. They take turns in one process. Who comes after whom matters (a worker of the one
before still refills its queue), and who was made first (where its tensors lie), by one or two per cent each: so the turns are
shuffled, and the loops are made anew several times in shuffled order. The table gives the median of all rounds' ratios, and how
sure that is. Frameworks that own the loop cannot be stepped in turns; benchmarks/run.py has them.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch
from accelerate import Accelerator
from switches import shown
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from train import determinism, models
from train.bench.conditions import conditions
from train.bench.loop import open_job
from train.config import Config
from train.data import loader as decoding
from train.data.plan import first_records, rows_of
from train.data.transforms import decode
from train.job import Job
from train.journal import Journal
from train.optim import build_optimizer
from train.receipt import recorder as receipt
from train.run import load_config
from train.run_folder import RunFolder
from train.stopping import StopRequest
from train.tasks.image_classification import ImageClassification
from train.trainer import Trainer

LOG_EVERY = 10
BARE, OURS, UNRECORDED = "bare PyTorch loop", "this trainer", "this trainer, no receipt"


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """The training split in memory, undecoded."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.task, ImageClassification)
        self.image = job.config.data.image
        labels = job.task.labels
        tables = (rows_of(job.sources.train, records) for records in first_records(job.sources.train, 20_000))
        self.rows = [(row["image"]["bytes"], labels.id(row["label"])) for table in tables for row in table.to_pylist()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        data, label = self.rows[place]
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.image.mean, self.image.std))
        return (decode(data, self.image.mode).float().div_(255) - mean).div_(std), torch.tensor(label)


class StepLog:
    """Writes the loss every `LOG_EVERY` steps, as a loop's own print would."""

    def __init__(self, sink: TextIO) -> None:
        self.sink, self.step = sink, 0

    def __call__(self, loss: Tensor) -> None:
        self.step += 1
        if self.step % LOG_EVERY == 0:
            print(f"step {self.step} loss {loss.item():.4f}", file=self.sink, flush=True)


def endless(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def fresh(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = models.build(job.config.model, job.task.given)
    return model, build_optimizer(job.config.optimizer, model)


def bare(job: Job, loader: DataLoader[tuple[Tensor, Tensor]], log: StepLog) -> Callable[[int], None]:
    device = job.accelerator.device
    model, optimizer = fresh(job)
    batches = endless(loader)
    model.to(device).train()

    def train(steps: int) -> None:
        for _ in range(steps):
            image, label = (value.to(device, non_blocking=True) for value in next(batches))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            log(loss)

    return train


def accelerated(job: Job, loader: DataLoader[tuple[Tensor, Tensor]], log: StepLog) -> Callable[[int], None]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, optimizer, prepared = accelerator.prepare(*fresh(job), loader)
    batches = endless(prepared)
    model.train()

    def train(steps: int) -> None:
        for _ in range(steps):
            image, label = next(batches)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(image), label)
            accelerator.backward(loss)
            optimizer.step()
            log(loss)

    return train


def ours(job: Job, folder: RunFolder, recorded: Callable[[], AbstractContextManager[Any]]) -> Callable[[int], None]:
    trainer = Trainer(job, StopRequest())
    journal = Journal(job, folder, {}, None, evaluated=0, seconds=0.0)
    with recorded():  # the workers are forked here
        trainer.begin(journal)

    def train(steps: int) -> None:
        with recorded():
            for _ in range(steps):
                trainer.train_step()

    return train


@contextmanager
def unrecorded() -> Iterator[None]:
    """Nothing is hashed, summed up or kept for a receipt."""
    with (
        mock.patch.object(decoding, "_digest", lambda fields, keys: 0),
        mock.patch.object(receipt, "shown", lambda before, step, lanes: before),
        mock.patch.object(receipt.Recorder, "step", lambda *arguments: None),
    ):
        yield


@click.command()
@click.argument("settings", nargs=-1)
@click.option("--rounds", default=60, show_default=True, help="Turns of each loop after one to warm up, in each block.")
@click.option("--blocks", default=6, show_default=True, help="Times that the loops are made anew.")
@click.option("--steps", default=1, show_default=True, help="Steps of a turn.")
def main(settings: tuple[str, ...], rounds: int, blocks: int, steps: int) -> None:
    times = Times({}, {})
    with tempfile.TemporaryDirectory() as scratch:
        for block in range(blocks):
            config = one_lane(settings, Path(scratch) / str(block), (rounds + 1) * steps + 1)
            job = measure(config, rounds, steps, random.Random(block), times)
    options = ["--rounds", str(rounds), "--blocks", str(blocks), "--steps", str(steps)]
    text = described(job, shown(["python", "benchmarks/loop.py", *settings, *options])) + "\n\n" + compared(times)
    click.echo(text)
    results.record("Step", text)
    sys.stdout.flush()
    os._exit(0)  # the trainers' reading threads are left where they are


def one_lane(settings: Sequence[str], output: Path, steps: int) -> Config:
    """What the settings say, as a run of some steps and nothing else."""
    files = [Path(setting) for setting in settings if "=" not in setting]
    return load_config(
        files or [Path(__file__).parent.parent / "configs" / "digits.yaml"],
        [
            "data.workers=1",
            *(setting for setting in settings if "=" in setting),
            f"run.output_dir={output}",
            "batch.lanes=1",
            f"tracking.every={LOG_EVERY}",
            f"steps={steps}",
            "epochs=",
            "evaluate.every=0",
            "checkpoint.every=0",
            "data.transforms.train=[]",
        ],
    )


def pictures(job: Job) -> DataLoader[tuple[Tensor, Tensor]]:
    size, workers = job.config.batch.size, job.workers
    pin = job.accelerator.device.type == "cuda"
    return DataLoader(
        Pictures(job), size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0, pin_memory=pin
    )


class Times(NamedTuple):
    """Seconds a step, by loop; `busy` is the CPU time of the training thread, without its waits."""

    wall: dict[str, list[float]]
    busy: dict[str, list[float]]


def measure(config: Config, rounds: int, steps: int, order: random.Random, times: Times) -> Job:
    job = open_job(config)
    loader = pictures(job)
    with Path(os.devnull).open("w") as sink:
        makers: dict[str, Callable[[], Callable[[int], None]]] = {
            BARE: lambda: bare(job, loader, StepLog(sink)),
            "Accelerate loop": lambda: accelerated(job, loader, StepLog(sink)),
            OURS: lambda: ours(job, RunFolder(config.folder / "with"), nullcontext),
            UNRECORDED: lambda: ours(job, RunFolder(config.folder / "without"), unrecorded),
        }
        names = list(makers)
        loops = {name: makers[name]() for name in order.sample(names, len(names))}
        for turn in range(rounds + 1):
            order.shuffle(names)
            for name in names:
                strict = config.run.model_copy(update={"determinism": "strict" if name.startswith("this trainer") else "fast"})
                determinism.apply(strict.model_copy(update={"threads": job.threads}), 1)
                began, worked = time.perf_counter(), time.thread_time()
                loops[name](steps)
                if job.accelerator.device.type == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    times.wall.setdefault(name, []).append((time.perf_counter() - began) / steps)
                    times.busy.setdefault(name, []).append((time.thread_time() - worked) / steps)
    return job


def middle(count: int) -> tuple[int, int]:
    """Which two of `count` ordered values hold their median between them in 19 of 20 repetitions (the sign test's interval)."""
    reach = 1.96 * math.sqrt(count) / 2
    return max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))


def described(job: Job, command: str) -> str:
    known = conditions(["0"] if torch.cuda.is_available() else [])
    lines = [
        f"`{command}`, medians of the rounds' ratios with their 95 % intervals",
        f"{job.config.model.name}, one lane of {job.config.batch.size}, not augmented, the loss logged every {LOG_EVERY} steps",
        f"{known['devices']}; CPU threads: {job.threads}, data workers: {job.workers}",
        known["software"],
    ]
    return "\n".join(f"- {line}" for line in lines)


def compared(times: Times) -> str:
    rows = [
        [
            name,
            f"{1000 * statistics.median(times.wall[name]):.2f}",
            ratio(times.wall[name], times.wall[BARE]),
            ratio(times.busy[name], times.busy[BARE]),
        ]
        for name in sorted(times.wall)
    ]
    cost = [ratio(own[OURS], own[UNRECORDED]) for own in times]
    header = ["loop", "ms a step", f"times the {BARE}", "in CPU time"]
    return f"{results.table(header, rows)}\n\nA step with its receipt, times one without: {cost[0]}; in CPU time: {cost[1]}."


def ratio(own: list[float], reference: list[float]) -> str:
    """The median of the rounds' ratios, and its 95 % interval."""
    ratios = sorted(time / other for time, other in zip(own, reference, strict=True))
    low, high = middle(len(ratios))
    return f"{statistics.median(ratios):.3f} ({ratios[low]:.3f} to {ratios[high]:.3f})"


if __name__ == "__main__":
    main()
