"""The training loop of a configuration in this process, of which a measurement makes some steps at a time."""

from __future__ import annotations

import io
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator

from train import determinism, switches
from train.bench.setups import parallel_of
from train.config import Config, Every
from train.job import Job, prepare
from train.journal import Journal, peak_memory
from train.parallel.mode import choose
from train.parallel.processes import Processes
from train.run import launch_facts, read_settings
from train.run_folder import RunFolder
from train.stopping import StopRequest
from train.trainer import Trainer

Level = Literal["strict", "fast"]

_LEAD = 2  # steps of a turn before those that are measured: what is ready from before is used up in them


def settings_of(words: Sequence[str], scratch: Path) -> Config:
    """The configuration on one device, with nothing beside its steps, which have no end."""
    config, _ = read_settings(words)
    never = {"every": Every(0)}
    return config.model_copy(
        update={
            "steps": 10**9,
            "epochs": None,
            "run": config.run.model_copy(update={"output_dir": scratch, "resume_from": None}),
            "evaluate": config.evaluate.model_copy(update=never),
            "checkpoint": config.checkpoint.model_copy(update=never),
            "parallel": parallel_of("single", config.parallel),
        }
    )


def at(config: Config, level: Level) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"determinism": level})})


def open_job(config: Config) -> Job:
    determinism.prepare_environment(config.run)
    launch = launch_facts()
    mode = choose(launch, config.parallel, config.speed)
    launch = switches.over(launch, config.speed)
    accelerator = Accelerator(cpu=mode.device == "cpu", **switches.accelerator_options(config.speed))
    return prepare(config, accelerator, Processes(accelerator), mode, launch, lambda note: None, saved=None)


class Loop:
    """Its steps take the batches of the first one, which are in memory, or others as they come from the workers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._said = io.StringIO()  # nobody wants to read of these steps
        with redirect_stderr(self._said):
            self.trainer = Trainer(job, _deaf())
            self.trainer.begin(Journal(job, RunFolder(job.config.folder), {}, None, evaluated=0, seconds=0.0))
        self._coming = self.trainer.batches
        self._kept = itertools.cycle([next(self._coming) for _ in job.lanes.local])

    def seconds(self, steps: int, *, in_memory: bool, logged: bool = False) -> float:
        """Of a step, in a turn of so many of them."""
        determinism.apply(self.job.config.run, 1)
        self.trainer.batches = self._kept if in_memory else self._coming
        tracking = self.job.config.tracking.model_copy(update={"every": int(logged)})
        self.trainer.config = self.job.config.model_copy(update={"tracking": tracking})
        with redirect_stderr(self._said):
            for _ in range(_LEAD):
                self.trainer.train_step()
            began = self._now()
            for _ in range(steps):
                self.trainer.train_step()
            return (self._now() - began) / steps

    def _now(self) -> float:
        if self.job.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.job.accelerator.device)
        return time.perf_counter()

    @property
    def memory_gib(self) -> float:
        """The most until now."""
        return peak_memory(self.job.accelerator.device) / 2**30


def _deaf() -> StopRequest:
    """A stop that never comes: here a signal ends the measurement."""
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    return stop


def told(round_: int, rounds: int) -> None:
    print(f"round {round_ + 1}/{rounds}", file=sys.stderr, flush=True)
