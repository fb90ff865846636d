"""How a process computes its lanes: passes through the model, whose gradients end up in `.grad` as the sums over all lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from train.config import Parallel
from train.data.loader import Batch
from train.parallel.buffers import LaneBuffers
from train.parallel.lanes import Lanes, TreeSum
from train.parallel.norm import norm_by_rows
from train.profiling.labels import labelled
from train.weights import cpu_copies

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train.tasks import Task


class LanePass(NamedTuple):
    """One lane's part of a step: its micro-batch, on the device, and how much it counts; a blank one counts nothing."""

    lane: int
    batch: Batch
    weight: int


class Engine:
    """One process and one device, one lane after the other. The other modes are subclasses, a file each.

    Strict sums follow the lanes' tree. Fast ones add where they lie and leave the order to the communication library.
    """

    together = False  # whether a process has only a part of the model: a pass, also of an evaluation, and a save need all of them
    lists = True  # whether all weights are of one kind, so that they may be updated as lists

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        lanes: Lanes,
        accelerator: Accelerator,
        options: Parallel,
        blank: Batch,
        *,
        strict: bool,
    ) -> None:
        self.options, self.blank = options, blank
        self.task, self.lanes, self.accelerator, self.strict = task, lanes, accelerator, strict
        self.plain = model  # its names are those of the checkpoints
        self.prepare(model)
        self.place(model)
        self.model = self.wrap(model)
        here = [parameter for parameter in model.parameters() if not parameter.is_meta]
        self.parameters = [parameter for parameter in here if parameter.requires_grad]
        self.buffers = LaneBuffers(model, lanes)
        self.partials = TreeSum()

    @property
    def reports(self) -> bool:
        """Whether this process's numbers of a lane count; where several compute the same lanes, those of one do."""
        return True

    def prepare(self, model: nn.Module) -> None:
        """What must be known of the model while it is still whole."""

    def place(self, model: nn.Module) -> None:
        """Put this model, or one with averaged weights, where it is computed."""
        model.to(self.accelerator.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """What is called in its place: with Accelerate's precision and compiler."""
        prepared: nn.Module = self.accelerator.prepare_model(model, evaluation_mode=True)  # that is, without DDP
        return prepared

    def forward_backward(self, passes: Sequence[LanePass], weight: int, seed: Callable[[int], None]) -> list[Tensor]:
        """The sum of each lane's losses. `weight` is that of the whole step; `seed` seeds the generators for a lane."""
        return [self._lane(one, weight, seed, last=one is passes[-1]) for one in passes]

    def _lane(self, one: LanePass, weight: int, seed: Callable[[int], None], *, last: bool) -> Tensor:
        seed(one.lane)
        counts = one.weight > 0
        self.buffers.start(keep=counts)
        with self.adding(last=last):
            loss = self._forward(one.batch)
            self._backward(loss, 1 / weight if counts else 0)
        self.buffers.collect(keep=counts)
        return loss.detach() if counts else torch.zeros_like(loss)

    @labelled("forward")
    def _forward(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model(self.task.inputs(batch)), batch)

    @labelled("backward")
    def _backward(self, loss: Tensor, share: float) -> None:
        # 0 x loss turns the gradients into NaN where the loss is not finite, on the device and without waiting for it.
        self.accelerator.backward(loss, gradient=loss.detach() * 0 + share)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """CPU copies of named tensors of a model, each as a whole; where this needs all processes, all ask for it."""
        return cpu_copies(tensors)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[Callable[[Tensor], Any]]:
        """What gives the outputs of `model` in evaluation mode."""
        model.eval()
        yield model
        model.train()

    @contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        """Surround one lane's passes and add its gradients to those of the lanes before it; the last one's end in `.grad`."""
        yield
        if last:
            self.partials.finish(self.gradients())
        elif self.strict:
            self.partials.push(self.gradients())
            for parameter in self.parameters:
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        for parameter in self.parameters:
            if parameter.grad is None:  # no part in this lane's loss
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters]  # type: ignore[misc]  # set just above

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient."""
        return norm_by_rows([parameter.grad for parameter in self.parameters if parameter.grad is not None])
