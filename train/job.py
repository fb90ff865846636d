"""Everything that a configuration stands for, opened and built but not yet started: data, model, lanes, lengths."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn

from train import determinism, models, switches, tasks
from train.config import Config, Every, lanes_problem
from train.data.loader import Batch, Decoding, refusal
from train.data.plan import epoch_length, first_records
from train.data.source import Source, Sources, StreamSource
from train.errors import RunError, UsageError
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode, config_problems
from train.parallel.processes import Processes
from train.seeds import seed_generators
from train.tasks import Task


@dataclass
class Job:
    """What a run consists of. `total_steps` and `warmup_steps` are in steps, `workers` and `threads` a process."""

    config: Config
    accelerator: Accelerator
    processes: Processes
    mode: Mode
    started: Launch
    task: Task
    lanes: Lanes
    model: nn.Module
    total_steps: int
    warmup_steps: int
    threads: int
    workers: int
    blank: Batch  # of a micro-batch's shape, for a lane whose samples are all left out

    @property
    def sources(self) -> Sources:
        return self.task.sources

    @property
    def epoch_length(self) -> int | None:
        """Samples of an epoch, None while a stream has not told."""
        return epoch_length(self.sources.train)

    @property
    def micro_batch(self) -> int:
        return self.config.batch.size // self.lanes.count

    def identity(self) -> dict[str, Any]:
        """What no key of the configuration says and a step's numbers depend on, as far as it is known."""
        return {"precision": self.accelerator.mixed_precision, **self.data()}

    def data(self) -> dict[str, Any]:
        """What the data are known by."""
        return {**self.sources.identity, **self.task.identity, "samples": self.epoch_length}

    def launch(self) -> dict[str, Any]:
        """What the launcher and Accelerate decided, with what said it."""
        return {
            "mode": self.mode.name,
            "device": self.mode.device,
            "precision": self.accelerator.mixed_precision,
            "compiler": self.started.compiler,
            "blocks": self.started.blocks,
            "machines": self.started.machines,
            "file": self.started.file,
            "settings": {key: list(said) for key, said in self.started.settings.items()},
        }

    def describe(self) -> list[str]:
        """The decisions, a line each."""
        batch, length = self.config.batch.size, self.epoch_length
        epochs = f"{self.total_steps * batch / length:.4g} epochs of {length:,} samples" if length else "epochs of unknown length"
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        compiler = self.started.compiler
        return [
            *(f"data: {note}" for note in self.sources.notes),
            f"model: {self.config.model.name}, {parameters:,} parameters",
            f"mode: {self.mode.name}, {self.mode.reasons[0]}",
            *(f"mode: {hint}" for hint in self.mode.reasons[1:]),
            f"device: {self.accelerator.device.type}, precision {self.accelerator.mixed_precision}, "
            f"{'' if compiler == 'no' else f'compiled by {compiler}, '}"
            f"{self.config.run.determinism}, {_counted(self.threads, 'CPU thread')} and "
            f"{_counted(self.workers, 'data worker')} a process",
            f"batch: {batch} samples a step = {_counted(self.lanes.count, 'lane')} x {self.micro_batch}, "
            f"{_counted(len(self.lanes.local), 'lane')} a process",
            f"length: {self.total_steps:,} steps, {epochs}",
        ]


def prepare(
    config: Config,
    accelerator: Accelerator,
    processes: Processes,
    mode: Mode,
    started: Launch,
    say: Callable[[str], None],
    *,
    saved: dict[str, Any] | None,
    weights: AbstractContextManager[Any] | None = None,
) -> Job:
    """Open and build what `config` names; `saved` is the state of the checkpoint that the run goes on from. The model is built,
    and tried on a sample, within `weights`, which may make them without memory."""
    threads = determinism.apply(config.run, processes.count)
    switches.set_kernels(config.speed)
    lanes = lanes_of(config, processes, mode, saved)
    task = tasks.find(config.task).open(config, accelerator.device, say)
    sources = task.sources
    if isinstance(sources.train, StreamSource):
        if saved and saved["sizes"]:
            learned = zip(sources.train.sizes, saved["sizes"], strict=False)  # other shards are refused by resume.check_data
            sources.train.sizes[:] = [now if now is not None else then for now, then in learned]
        if config.epochs is not None and None in sources.train.sizes:
            say("counting the records of an epoch, which this format does not tell ...")
            sources.train.count()
    sample = _first_sample(sources.train, task, config)
    seed_generators(config.run.seed)
    with weights or nullcontext():
        model = models.build(config.model, task.given)
        task.fits(model, sample, config.model.name)
    switches.lay_out(model, config.speed)
    length, batch = epoch_length(sources.train), config.batch.size
    total = config.steps or math.ceil((config.epochs or 0) * (length or 0) / batch)
    return Job(
        config=config,
        accelerator=accelerator,
        processes=processes,
        mode=mode,
        started=started,
        task=task,
        lanes=lanes,
        model=model,
        total_steps=total,
        warmup_steps=_steps(config.schedule.warmup, length, batch),
        threads=threads,
        workers=_workers(config, processes),
        blank=repeated(sample, batch // lanes.count),
    )


def _first_sample(source: Source, task: Task, config: Config) -> Batch:
    """A batch of the first sample that can be read."""
    decoding = Decoding(source, task.decoder(config.run.seed, training=True))
    for records in first_records(source, 64):
        batch = decoding[records]
        if batch.failure:
            raise RunError(batch.failure)
        if batch.bad and config.data.on_error == "stop":
            raise refusal(batch.bad[0])
        if batch.keys:
            return batch
    raise RunError(f"none of the first 64 samples can be read; the last: {batch.bad[0].where}: {batch.bad[0].reason}")


def repeated(sample: Batch, times: int) -> Batch:
    """A blank batch: the first sample, so many times."""
    fields = {name: value[:1].repeat(times, *([1] * (value.dim() - 1))) for name, value in sample.fields.items()}
    return Batch(fields, [])


def lanes_of(config: Config, processes: Processes, mode: Mode, saved: dict[str, Any] | None = None) -> Lanes:
    """The lanes of this process. UsageError where they cannot be shared."""
    count = config.batch.lanes
    if count == "auto":
        count = saved["lanes"] if saved else processes.count
        if problem := lanes_problem(config.batch.size, count):
            raise UsageError(f"batch.lanes: auto means one lane a process, but {problem}")
    if problems := config_problems(mode, config, count):
        raise UsageError("\n".join(problems))
    if not mode.shares_lanes:
        return Lanes(count)
    return Lanes(count, processes.rank, processes.count, interleaved=mode.name == "fsdp")


def _workers(config: Config, processes: Processes) -> int:
    if config.data.workers != "auto":
        return config.data.workers
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes.count))
    return max(1, min(8, len(os.sched_getaffinity(0)) // local))


def _steps(every: Every, length: int | None, batch: int) -> int:
    if every.unit == "steps":
        return every.count
    if length is None:
        raise UsageError(f"schedule.warmup: {every} needs data whose length is known; give it in steps")
    return math.ceil(every.count * length / batch)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
