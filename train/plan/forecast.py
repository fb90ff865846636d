"""`train plan`: from the command line to an answer."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from train import determinism, models, switches
from train.config import Config, Parallel
from train.doctor.machine import usable_memory
from train.job import Job, prepare, repeated
from train.parallel.mode import Mode, choose
from train.parallel.processes import Processes
from train.plan import report
from train.plan.modes import Line
from train.plan.outlook import Device, Outlook, outlook
from train.plan.stages import stage_lines
from train.plan.timing import Timing, largest_that_runs
from train.plan.trace import Build, Trace, trace, weightless
from train.run import launch_facts, read_settings

# Of a GPU's memory: CUDA's context, what the libraries work in, and what lies unused between tensors take the rest.
_USABLE = 0.9


class Question(NamedTuple):
    """What was asked for on the command line. `memory` in GiB, `price` of a device for an hour."""

    settings: tuple[str, ...]
    memory: float | None
    devices: int | None
    precision: str
    price: float | None
    quick: bool


def answer(question: Question, *, as_json: bool) -> None:
    """Trace, time, and print what is to be expected."""
    config, _ = read_settings(question.settings)
    determinism.prepare_environment(config.run)
    job = _prepared(config, question.precision)
    device = _device(job, question)

    def build() -> torch.nn.Module:
        model = models.build(config.model, job.task.given)
        switches.lay_out(model, config.speed)
        return model

    line = _line(job, build)

    def lines_of(mode: str) -> list[Line]:
        if mode != "pipeline":
            return [line]
        blanks = [repeated(job.blank, samples) for samples in _sizes(job)]
        accelerator, lanes = job.accelerator, job.lanes.count
        return stage_lines(build, job.task, blanks, accelerator, job.config, config.parallel, _say, lanes=lanes)

    outlooks = [outlook(name, config, device, lines_of) for name in _names(config, device)]
    timing = None if question.quick or question.memory else _timed(job, build, outlooks[0])
    results = report.Results(job, device, line.one, outlooks, timing, question.settings, question.precision, question.price)
    if as_json:
        print(json.dumps(results.facts(), indent=2))
    else:
        report.show(results)


def _prepared(config: Config, precision: str) -> Job:
    """The job of one process on the device that is here, its weights taking no memory."""
    from accelerate import Accelerator

    facts = replace(launch_facts(), precision=precision)
    alone = Parallel(device=config.parallel.device)
    mode = choose(facts, alone, config.speed) if facts.devices else Mode("single", "cpu", ("one process",))
    facts = switches.over(facts, config.speed)
    # fp16 takes as much as bf16, in which a CPU computes.
    precision = "bf16" if mode.device == "cpu" and facts.precision == "fp16" else facts.precision
    options = switches.accelerator_options(config.speed) | {"mixed_precision": precision}
    accelerator = Accelerator(cpu=mode.device == "cpu", **options)
    one = config.model_copy(update={"parallel": alone})
    return prepare(one, accelerator, Processes(accelerator), mode, facts, _say, saved=None, weights=weightless(accelerator))


def _device(job: Job, question: Question) -> Device:
    here = job.accelerator.device
    if question.memory is not None:
        memory = round(question.memory * 2**30)
        return Device(f"a card of {question.memory:g} GiB", question.devices or 1, memory, round(memory * _USABLE))
    if here.type == "cuda":
        memory = torch.cuda.get_device_properties(here).total_memory
        count = question.devices or torch.cuda.device_count()
        return Device(torch.cuda.get_device_name(here), count, memory, round(memory * _USABLE))
    memory = usable_memory()
    return Device("CPU", question.devices or 2, memory, memory, shared=True)


def _line(job: Job, build: Build) -> Line:
    """Of two traces: at a lane's samples, and at half of them."""

    def traced(samples: int) -> Trace:
        _say(f"tracing a step with lanes of {samples} samples ...")
        blank = repeated(job.blank, samples)
        return trace(build, job.task, blank, job.accelerator, job.config, lanes=job.lanes.count)

    one, other = map(traced, _sizes(job))
    return Line(one, other)


def _sizes(job: Job) -> tuple[int, int]:
    """Never one sample beside several, of which some models cannot take the statistics of a batch."""
    return job.micro_batch, job.micro_batch // 2 if job.micro_batch > 3 else 2 * job.micro_batch


def _names(config: Config, device: Device) -> list[str]:
    """The modes that so many devices could run."""
    count = device.count
    several = [f"ddp:{count}", f"fsdp:{count}", *([] if device.shared else [f"data_parallel:{count}"])] if count > 1 else []
    stages = config.parallel.pipeline.stages
    return ["single", *several, *([f"pipeline:{stages}"] if stages > 1 else [])]


def _timed(job: Job, build: Build, alone: Outlook) -> Timing | None:
    """None on a CPU that has not the memory, since it would end the process."""
    if job.accelerator.device.type == "cpu" and not alone.fits:
        return None
    sample = repeated(job.blank, 1)
    return largest_that_runs(build, job.task, sample, job.accelerator, job.config, job.started, job.micro_batch, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
