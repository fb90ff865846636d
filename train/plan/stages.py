"""The stages of a pipeline, each as a model and a task of its own, so that a step of it is traced as one of a whole model is.

A stage's lane has, beside its samples, what the stage before hands over and room for the gradients that come back, both of which
the schedule makes for all lanes of a step before the first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from train.config import Config, Parallel
from train.data.loader import Batch
from train.parallel.pipeline import cut, lend, names_of_stages, refuse_uncuttable, slots
from train.plan.modes import Line
from train.plan.trace import Build, trace, weightless
from train.tasks import Task

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.fx import GraphModule


def stage_lines(
    build: Build, task: Task, blanks: Sequence[Batch], accelerator: Accelerator, config: Config, parallel: Parallel,
    say: Callable[[str], None], *, lanes: int,
) -> list[Line]:  # fmt: skip
    """A line for each stage that `parallel` cuts the model into, from traces with lanes of the samples of two batches.

    UsageError where the model cannot be cut so, RunError where it cannot be traced.
    """
    first, other = [_cut_and_traced(build, task, blank, accelerator, config, parallel, say, lanes) for blank in blanks]
    count = parallel.pipeline.stages
    in_flight = [count - stage if parallel.pipeline.schedule == "1f1b" else math.inf for stage in range(count)]
    return [Line(*traces) for traces in zip(first, other, in_flight, strict=True)]


def _cut_and_traced(
    build: Build, task: Task, blank: Batch, accelerator: Accelerator, config: Config, parallel: Parallel,
    say: Callable[[str], None], lanes: int,
) -> list[Any]:  # fmt: skip
    model = _skeleton(build, accelerator, parallel)
    pipe = cut(model.train(), task.inputs(blank), parallel)
    names = names_of_stages(pipe, model)
    traces = []
    for number, own in enumerate(names):
        say(f"tracing stage {number + 1} of {len(names)} with lanes of {_samples(blank)} samples ...")
        graph = cast("GraphModule", pipe.get_stage_module(number))
        part = _Part(task, graph, first=number == 0, last=number == len(names) - 1)

        def built(graph: nn.Module = graph, own: set[str] = own) -> nn.Module:
            return Stage(build(), graph, own)

        traces.append(trace(built, cast(Task, part), part.blank(blank), accelerator, config, lanes=lanes))
    return traces


def _samples(blank: Batch) -> int:
    return len(next(iter(blank.fields.values())))


def _skeleton(build: Build, accelerator: Accelerator, parallel: Parallel) -> nn.Module:
    """The model on the meta device."""
    with weightless(accelerator):
        model = build()
    refuse_uncuttable(model, parallel)
    for _, tensors, key in slots(model):
        old = tensors[key]
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
        tensors[key] = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
    return model


class Stage(nn.Module):
    """A stage's graph, computing with the tensors of `model`, of which it keeps those that it is said to own."""

    def __init__(self, model: nn.Module, graph: nn.Module, own: set[str]) -> None:
        super().__init__()
        lend(model, graph)
        self.graph = graph
        used = {name for name, _, _ in slots(graph)}
        for name, tensors, key in slots(model):
            if name in own - used and isinstance(tensors[key], nn.Parameter):
                self.register_parameter(f"unused {name}".replace(".", " "), tensors[key])

    def forward(self, given: tuple[Tensor, ...]) -> Any:
        return self.graph(*given)


class _Part:
    """The task of a stage: `inputs` is what it is given, and the loss of what it hands over has the gradients that come back."""

    def __init__(self, task: Task, graph: GraphModule, *, first: bool, last: bool) -> None:
        self.task, self.first, self.last = task, first, last
        nodes = list(graph.graph.nodes)
        self.given = [] if first else [node.meta["val"] for node in nodes if node.op == "placeholder"]
        self.handed = [] if last else [node.meta["val"] for node in tree_leaves(nodes[-1].args)]
        self._sent: deque[tuple[Tensor, ...]] = deque(maxlen=2)  # the gradients of a lane's are sent during the next one

    def blank(self, samples: Batch) -> Batch:
        """Of memory that nothing touches."""
        wanted = {f"given {place}": value for place, value in enumerate(self.given)}
        wanted |= {f"gradient {place}": value for place, value in enumerate(self.handed) if value.is_floating_point()}
        made = {name: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for name, one in wanted.items()}
        return Batch(samples.fields | made, [])

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        if self.first:
            return (self.task.inputs(batch),)
        given = [batch.fields[f"given {place}"].detach() for place in range(len(self.given))]
        self._sent.append(tuple(one.requires_grad_(one.is_floating_point()) for one in given))
        return self._sent[-1]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        if self.last:
            return self.task.loss(output, batch)
        outputs = output if isinstance(output, tuple | list) else (output,)
        gradients = [batch.fields.get(f"gradient {place}") for place in range(len(outputs))]
        loss: Tensor = _Handed.apply(gradients, *outputs)
        return loss


class _Handed(torch.autograd.Function):
    """Outputs of a stage, whose gradients come from the next one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.gradients
