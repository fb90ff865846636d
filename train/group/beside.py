"""How the runs of a group compute beside each other, so that each has the bits that it has alone.

On a CPU each step is computed in a thread of a pool, on the cores that a strict run leaves idle. The threads share torch's
generator; so each has its own, seeded alike, from which a model's forward pass draws. On a GPU each run has a stream. There
the generator's state at the launch of a kernel decides, and one thread launches all.

Stacking the weights (`torch.func.vmap`) would give other bits, and on a CPU no more samples a second: `benchmarks/seeds.py`.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from train import courses
from train.errors import RunError
from train.job import Job
from train.parallel import build_engine
from train.parallel.engine import LanePass
from train.seeds import OWN_GENERATOR, seed_lane

# Tagged like the kernels of GPUs, and refuses a dropout.
_DRAWS_NOTHING = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Way(NamedTuple):
    """`told` is for the person. The other two are what `courses.conduct` wants."""

    told: str
    submit: Callable[[courses.Work], Future[Any]]
    surroundings: Callable[[int], AbstractContextManager[Any]]


def choose(jobs: Mapping[int, Job]) -> Way:
    """The fastest way that keeps the bits, tried out on the first of the jobs, by seed."""
    job = next(iter(jobs.values()))
    if job.accelerator.device.type == "cuda":
        return _streams(tuple(jobs), job.accelerator.device)
    threads = min(len(jobs), len(os.sched_getaffinity(0)) // job.threads)
    if reason := _reason_against_threads(job, threads):
        return Way(f"one after the other, step by step: {reason}", courses.done, _nowhere_else)
    return Way(f"{threads} at a time, in threads", _pool(threads, job.threads).submit, _nowhere_else)


def draw_from_own_generator(model: nn.Module) -> None:
    """Let the training passes of `model` draw from the generator of the thread that they are made in, where it has one."""
    forward = model.forward

    @wraps(forward)
    def drawing(*arguments: Any, **named: Any) -> Any:
        if not model.training or OWN_GENERATOR.get() is None:
            return forward(*arguments, **named)
        with _Drawing():  # type: ignore[no-untyped-call]  # torch has no annotations for it
            return forward(*arguments, **named)

    model.forward = drawing


class _Drawing(TorchDispatchMode):
    """Gives each operation that draws random numbers the thread's own generator."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Sequence[Any] = (), named: Any = None) -> Any:
        named = named or {}
        draws = torch.Tag.nondeterministic_seeded in operation.tags and operation is not _DRAWS_NOTHING
        if draws and named.get("generator") is None:
            if all(argument.name != "generator" for argument in operation._schema.arguments):
                raise RunError(f"the model draws random numbers by {operation}, which takes no generator")
            named = {**named, "generator": OWN_GENERATOR.get()}
        return operation(*arguments, **named)


def _nowhere_else(seed: int) -> AbstractContextManager[Any]:
    return nullcontext()


def _streams(seeds: Sequence[int], device: torch.device) -> Way:
    streams = {seed: torch.cuda.Stream(device) for seed in seeds}
    for stream in streams.values():
        stream.wait_stream(torch.cuda.current_stream(device))  # on which the weights were made
    return Way("each on a CUDA stream of its own", courses.done, lambda seed: torch.cuda.stream(streams[seed]))


def _pool(size: int, threads: int) -> ThreadPoolExecutor:
    def begin() -> None:
        torch.get_num_threads()  # a thread's first operation takes the number that another set last
        torch.set_num_threads(threads)
        OWN_GENERATOR.set(torch.Generator())

    return ThreadPoolExecutor(size, "seed", begin)


def _reason_against_threads(job: Job, threads: int) -> str | None:
    if threads < 2:
        return f"the cores that there are do not suffice for two runs of {job.threads} CPU threads"
    if job.started.compiler != "no":
        return "compiled models are for one thread"
    if job.accelerator.mixed_precision != "no":
        return "autocast keeps the casts of weights for all threads, and one that ends drops those of the others"
    if job.config.speed.recompute:
        return "speed.recompute puts back the generator of the process alone"
    try:
        alone = _step(job)
        before = _drawn()
        with _pool(1, job.threads) as pool:
            in_thread = pool.submit(_step, job).result()
        if _drawn() != before:
            return "the model draws random numbers by a generator of the process"
    except RunError as error:
        return str(error)
    except Exception:  # which the run's own first step explains
        return "the first step fails"
    finally:
        job.accelerator.free_memory()
    same = all(map(torch.equal, alone, in_thread))
    return None if same else "a step in a thread has other bits"


def _drawn() -> bytes:
    """The states of the process's generators, which each number drawn changes."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.default_generator.get_state().tolist()))


def _step(job: Job) -> list[Tensor]:
    """Losses, gradients and buffers of a step of blank batches, made by a copy of the model."""
    model = copy.deepcopy(job.model)
    engine = build_engine(job.mode, model, job.task, job.lanes, job.accelerator, job.config, job.blank)
    draw_from_own_generator(model)
    engine.model.train()
    passes = [LanePass(lane, job.blank, job.micro_batch) for lane in job.lanes.local]
    losses = engine.forward_backward(passes, job.config.batch.size, partial(seed_lane, job.config.run.seed, 0))
    return [*losses, *engine.gradients(), *model.buffers()]
