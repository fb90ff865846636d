"""One step of a run, made with tensors that have shapes and no memory (FakeTensorMode), while what they would take is counted.

It is the trainer's own step: engine, precision, optimizer and averaged weights are those of a run of one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from train.config import Config, Ema
from train.data.loader import Batch
from train.errors import RunError, UsageError
from train.learner import Learner
from train.optim import is_quantised
from train.parallel.engine import LanePass
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode
from train.parallel.units import units
from train.plan.memory import Kind, Memory
from train.tasks import Task
from train.weights import parts

if TYPE_CHECKING:
    from accelerate import Accelerator

Build = Callable[[], nn.Module]
_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass(frozen=True)
class Trace:
    """Bytes on the one device, at the moment of the passes and at that of the update when they are most."""

    micro_batch: int
    lanes: int  # that were traced: one, or two, of which the second finds the first one's gradients
    passes: Counter[Kind]
    update: Counter[Kind]
    activations: int  # at most in the passes, whatever else there is at that moment
    held: int  # of them, what a lane keeps between its forward and its backward pass beside its samples
    gradient: int  # one copy of the gradients
    inputs: int  # one lane's samples, which are on the device from the step's start on
    host: int  # optimizer state that lies in the host's memory
    largest_unit: int  # weights of the largest part that FSDP gathers at one time
    outside_units: int  # weights of no such part, which stay gathered


def trace(build: Build, task: Task, blank: Batch, accelerator: Accelerator, config: Config, *, lanes: int) -> Trace:
    """A step of `lanes` lanes whose samples are as many, and of the shapes, as those of `blank`.

    RunError for a model that cannot be traced, since what it computes depends on the values of its tensors.
    """
    memory = Memory(accelerator.device)
    with weightless(accelerator):
        model = build()
        traced = Lanes(min(lanes, 2))
        without_average = config.model_copy(update={"ema": Ema()})  # fake weights cannot be copied
        learner = Learner(
            without_average, Mode("single", accelerator.device.type, ()), Launch(), model, task, traced, accelerator, blank
        )
        engine = learner.engine
        engine.model.train()
        memory.mark([*model.parameters(), *model.buffers()], "weights")
        if config.ema.decay:
            memory.now["averaged weights"] = size([*model.parameters(), *model.buffers()])
        if learner.host is not None:
            learner.host.place = torch.device("meta")  # which is no device's memory, not a CPU's either that stands for a GPU
        for parameter in engine.parameters:
            parameter.register_post_accumulate_grad_hook(lambda one: memory.mark([one.grad], "gradients"))
        with memory:
            engine.gradients()
            learner.optimizer.step()  # makes its state, which all later steps find
            learner.optimizer.zero_grad()
            memory.mark(_tensors(learner.optimizer.state), "optimizer state")
            batches = [Batch({name: torch.empty_like(value) for name, value in blank.fields.items()}, []) for _ in traced.local]
            passes = [LanePass(lane, batch.to(accelerator.device), 1) for lane, batch in zip(traced.local, batches, strict=True)]
            memory.restart()
            between: list[int] = [memory.now["activations"]]
            with _told_of_losses(task, lambda: between.append(memory.now["activations"])):
                engine.forward_backward(passes, len(passes), lambda lane: None)
            of_passes, activations = memory.peak, memory.most_activations
            memory.mark(engine.gradients(), "gradients")
            memory.restart()
            learner.clip()
            if accelerator.device.type == "cpu" or not is_quantised(config.optimizer.name):  # torchao's is one kernel a weight
                learner.update()
        gathered = [size(unit.parameters()) for unit in units(model)]
        return Trace(
            micro_batch=len(next(iter(blank.fields.values()))),
            lanes=traced.count,
            passes=of_passes,
            update=memory.peak,
            activations=activations,
            held=between[1] - between[0],
            gradient=size(engine.parameters),
            inputs=size(blank.fields.values()),
            host=0 if learner.host is None else size(_tensors(learner.host.kept)),
            largest_unit=max(gathered, default=0),
            outside_units=size(model.parameters()) - sum(gathered),
        )


@contextmanager
def _told_of_losses(task: Task, tell: Callable[[], None]) -> Iterator[None]:
    """Tell each time that a lane's forward pass is at its end."""

    def loss(output: Any, batch: Batch) -> Tensor:
        made = of_task(output, batch)
        tell()
        return made

    of_task = task.loss
    with patch.object(task, "loss", loss):
        yield


@contextmanager
def weightless(accelerator: Accelerator) -> Iterator[None]:
    """Within this, tensors are made on the device and take no memory; what needs their values raises RunError."""
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device(accelerator.device),
            torch.compiler.set_stance("force_eager"),  # torchao would compile its update
            patch.object(nn.Module, "to", lambda module, *_, **__: module),  # torch cannot move fake weights; they are there
            patch.object(accelerator, "device_placement", False),  # it would copy torchao's learning rate, which is a fake tensor
            patch.object(accelerator, "scaler", None),  # fp16's, which asks whether the gradients are finite
        ):
            yield
    except (*_VALUES, UsageError) as error:
        needed = error.__cause__ if isinstance(error, UsageError) else error  # a model that is tried on a sample
        if not isinstance(needed, _VALUES):
            raise
        raise RunError(
            "the memory cannot be forecast, since the model or its optimizer needs the values of tensors "
            f"({type(needed).__name__}: {needed}). `python -m train bench scaling` measures it."
        ) from error


def size(tensors: Any) -> int:
    """Bytes of some tensors, each counted once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(state: Any) -> list[Tensor]:
    """Those of an optimizer's state; of quantised ones what they consist of."""
    return [part for kept in state.values() for value in kept.values() if isinstance(value, Tensor) for part in parts(value)]
