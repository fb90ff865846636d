"""The training loop of a configuration, of which a measurement makes some steps at a time."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from train import determinism, switches
from train.bench.setups import parallel_of
from train.config import Config, Every
from train.errors import LockstepError, RunError
from train.job import Job, prepare
from train.journal import Journal, peak_memory
from train.parallel.mode import choose
from train.parallel.processes import Processes
from train.run import launch_facts, read_settings
from train.run_folder import RunFolder
from train.stopping import StopRequest, ask_for_signal_when_parent_dies
from train.trainer import Trainer

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

    def memory_gib(self) -> float:
        """The most until now."""
        return peak_memory(self.job.accelerator.device) / 2**30

    def device(self) -> str:
        return str(self.job.accelerator.device.type)

    def describe(self) -> list[str]:
        return self.job.describe()


class Apart:
    """A Loop in a process of its own, which alone has its memory, its precision and its kernels. Ended by `close`."""

    def __init__(self, config: Config) -> None:
        fork = multiprocessing.get_context("fork")  # nothing has been computed here yet
        self._connection, end = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(config, end))
        self._process.start()
        end.close()
        self._answer()  # once it is made

    def seconds(self, steps: int, *, in_memory: bool, logged: bool = False) -> float:
        return float(self._ask("seconds", steps, in_memory=in_memory, logged=logged))

    def memory_gib(self) -> float:
        return float(self._ask("memory_gib"))

    def device(self) -> str:
        return str(self._ask("device"))

    def describe(self) -> list[str]:
        return list(self._ask("describe"))

    def close(self) -> None:
        if self._process.is_alive():
            os.killpg(self._process.pid or 0, signal.SIGKILL)  # its data workers too
        self._process.join()

    def _ask(self, name: str, *values: Any, **named: Any) -> Any:
        self._connection.send((name, values, named))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RunError("the process that was measured has been killed; was it out of memory?") from None
        if isinstance(answer, Exception):
            self.close()
            raise answer
        return answer


def _serve(config: Config, connection: Connection) -> None:
    os.setsid()
    ask_for_signal_when_parent_dies(signal.SIGKILL)
    try:
        loop = Loop(open_job(config))
        connection.send(None)
        while True:
            name, values, named = connection.recv()
            connection.send(getattr(loop, name)(*values, **named))
    except LockstepError as error:
        connection.send(error)
    except Exception as error:  # not all of them can be sent
        connection.send(RunError(f"{type(error).__name__}: {error}"))
    os._exit(1)  # threads that read ahead are left where they are


def _deaf() -> StopRequest:
    """A stop that never comes: here a signal ends the measurement."""
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    return stop


def told(round_: int, rounds: int) -> None:
    print(f"round {round_ + 1}/{rounds}", file=sys.stderr, flush=True)
