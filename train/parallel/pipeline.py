"""Pipeline parallelism: the model is cut into stages, a process each, and the lanes are the micro-batches that flow through.

The library cuts the model's graph and orders the passes (1F1B or GPipe); each stage takes the lanes one after the other in both
directions, so that seeds, buffers and sums are those of a single process, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import Parallel
from train.errors import UsageError
from train.parallel.engine import Engine, LanePass
from train.parallel.lanes import TreeSum
from train.parallel.norm import rows
from train.parallel.parts import refuse_unknown, tied
from train.profiling.labels import labelled

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe, ScheduleGPipe


class PipelineEngine(Engine):
    """The stage of this process. The weights of the others are on the meta device here, and nothing but names and shapes."""

    together = True

    def prepare(self, model: nn.Module) -> None:
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        refuse_uncuttable(model, self.options)
        rank: int = self.accelerator.process_index
        self.first, self.last = rank == 0, rank == self.options.pipeline.stages - 1
        self.skeleton = copy.deepcopy(model).to("meta")  # what is cut: a graph has one mode and one size of batch
        inputs = self.task.inputs(self.blank.to(self.accelerator.device))
        pipe = cut(copy.deepcopy(self.skeleton).train(), inputs, self.options)
        self.names = names_of_stages(pipe, model)[rank]
        self.stage = pipe.build_stage(rank, self.accelerator.device)
        schedule = Schedule1F1B if self.options.pipeline.schedule == "1f1b" else ScheduleGPipe
        self.schedule = schedule(self.stage, self.lanes.count, loss_fn=self._loss, scale_grads=False)
        self.evaluations: dict[torch.Size, tuple[nn.Module, ScheduleGPipe]] = {}
        words = dist.new_group(backend="gloo")  # apart from what the schedule sends
        assert isinstance(words, dist.ProcessGroup)
        self.words = words
        self._sums: dict[Tensor, TreeSum] = {}
        self._generators: list[tuple[dist.Work, Tensor]] = []

    @property
    def reports(self) -> bool:
        return self.last

    def place(self, model: nn.Module) -> None:
        for name, tensors, key in slots(model):
            tensor = tensors[key]
            if name in self.names:
                tensor.data = tensor.data.to(self.accelerator.device)
            elif isinstance(tensor, nn.Parameter):
                tensors[key] = nn.Parameter(tensor.to("meta"), requires_grad=tensor.requires_grad)
            else:
                tensors[key] = tensor.to("meta")

    def wrap(self, model: nn.Module) -> nn.Module:
        self.accelerator.prepare_model(self.stage.submod, device_placement=False, evaluation_mode=True)
        lend(model, self.stage.submod)
        self.stage.submod.register_forward_pre_hook(self._before_lane)
        self.stage.submod.register_forward_hook(self._after_lane)
        if self.strict:
            for parameter in self.stage.submod.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._take)
        return model

    @labelled("forward and backward")
    def forward_backward(self, passes: Sequence[LanePass], weight: int, seed: Callable[[int], None]) -> list[Tensor]:
        self._weight, self._seed = weight, seed
        self._coming = iter(passes)
        self._losses: list[Tensor] = []
        self.schedule.step(
            arg_mbs=[(self.task.inputs(one.batch),) for one in passes] if self.first else None,
            target_mbs=list(passes) if self.last else None,
            return_outputs=False,
        )
        for sent, _ in self._generators:
            sent.wait()
        self._generators.clear()
        for parameter, total in self._sums.items():
            parameter.grad = total.total()[0]
        self._sums.clear()
        self.gradients()
        return self._losses

    def gradient_norm(self) -> Tensor:
        """All rows in the model's order; what this process does not have is zero here, and adds nothing."""
        trained = [parameter for parameter in self.plain.parameters() if parameter.requires_grad]
        device = self.accelerator.device
        norms = torch.cat(
            [
                torch.zeros(len(one) if one.dim() else 1, device=device) if one.is_meta or one.grad is None else rows(one.grad)
                for one in trained
            ]
        )
        dist.all_reduce(norms)
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[Callable[[Tensor], Any]]:
        for stage, _ in self.evaluations.values():
            lend(model, stage)
        yield partial(self._outputs, model)

    def _outputs(self, model: nn.Module, inputs: Tensor) -> Any:
        """The model's output, on the last stage."""
        if inputs.shape not in self.evaluations:
            self.evaluations[inputs.shape] = self._evaluation(model, inputs)
        _, schedule = self.evaluations[inputs.shape]
        return schedule.eval(arg_mbs=[(inputs,)] if self.first else None)

    def _evaluation(self, model: nn.Module, inputs: Tensor) -> tuple[nn.Module, ScheduleGPipe]:
        from torch.distributed.pipelining import ScheduleGPipe

        pipe = cut(copy.deepcopy(self.skeleton).eval(), inputs, self.options)
        stage = pipe.build_stage(self.accelerator.process_index, self.accelerator.device)
        self.accelerator.prepare_model(stage.submod, device_placement=False, evaluation_mode=True)
        lend(model, stage.submod)
        return stage.submod, ScheduleGPipe(stage, 1)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stages: list[Any] = [None] * self.options.pipeline.stages
        dist.all_gather_object(stages, super().whole(tensors), group=self.words)
        everything = {name: tensor for stage in stages for name, tensor in stage.items()}
        return {name: everything[name] for name in tensors}

    def _before_lane(self, stage: nn.Module, inputs: Any) -> None:
        self._one = next(self._coming)
        if self.first:
            self._seed(self._one.lane)
        else:
            self._take_over_generators()
        self.buffers.start(keep=self._one.weight > 0)

    def _after_lane(self, stage: nn.Module, inputs: Any, output: Any) -> None:
        self.buffers.collect(keep=self._one.weight > 0)
        if not self.last:
            self._hand_over_generators()

    def _loss(self, output: Any, one: LanePass) -> Tensor:
        loss = self.task.loss(output, one.batch)
        counts = one.weight > 0
        self._losses.append(loss.detach() if counts else torch.zeros_like(loss))
        return loss * (loss.detach() * 0 + (1 / self._weight if counts else 0))  # as in Engine

    def _take(self, parameter: Tensor) -> None:
        """After each backward pass of a lane."""
        assert parameter.grad is not None
        self._sums.setdefault(parameter, TreeSum()).push([parameter.grad])
        parameter.grad = None

    def _hand_over_generators(self) -> None:
        """The next stage draws on where this one has stopped, as within one process."""
        states = [torch.get_rng_state()]
        if self.accelerator.device.type == "cuda":
            states.append(torch.cuda.get_rng_state())
        state = torch.cat(states)
        sent = dist.isend(state, group=self.words, group_dst=self.accelerator.process_index + 1)
        assert sent is not None
        self._generators.append((sent, state))

    def _take_over_generators(self) -> None:
        size = len(torch.get_rng_state())
        more = len(torch.cuda.get_rng_state()) if self.accelerator.device.type == "cuda" else 0
        state = torch.empty(size + more, dtype=torch.uint8)
        dist.recv(state, group=self.words, group_src=self.accelerator.process_index - 1)
        torch.set_rng_state(state[:size])
        if more:
            torch.cuda.set_rng_state(state[size:])


def refuse_uncuttable(model: nn.Module, options: Parallel) -> None:
    """UsageError for what can be said before the model is cut."""
    refuse_unknown(model, options.pipeline.split_at, "parallel.pipeline.split_at")
    if shared := tied(model):
        raise UsageError(f"parallel.pipeline: {', '.join(shared)} are one weight, which a pipeline does not support")


def cut(model: nn.Module, inputs: Tensor, options: Parallel) -> Pipe:
    """The stages of a model that is on the meta device, for inputs of these shapes. UsageError where it cannot be cut so."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    at = dict.fromkeys(options.pipeline.split_at, SplitPoint.BEGINNING)
    try:
        pipe = pipeline(model, mb_args=(inputs.to("meta"),), split_spec=at)
    except RuntimeError as error:
        raise UsageError(f"parallel.pipeline: this model cannot be cut: {error.__cause__ or error}") from error
    if pipe.num_stages != options.pipeline.stages:
        raise UsageError(
            f"parallel.pipeline.split_at: {', '.join(at)} cut the model into {pipe.num_stages} stages, not "
            f"{options.pipeline.stages}: a module that forward calls just once begins a stage"
        )
    return pipe


def names_of_stages(pipe: Pipe, model: nn.Module) -> list[set[str]]:
    """The parameters and buffers of each stage. Those that no stage computes with are the last one's."""
    stages = [{name for name, _, _ in slots(pipe.get_stage_module(number))} for number in range(pipe.num_stages)]
    everything = [name for name, _, _ in slots(model)]
    if shared := [name for name in everything if sum(name in names for names in stages) > 1]:
        raise UsageError(f"parallel.pipeline.split_at: {', '.join(shared)} would be in several stages; cut elsewhere")
    stages[-1] |= set(everything) - set().union(*stages)
    return stages


def slots(model: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Each parameter and buffer by its full name, with the dictionary and the key where its module keeps it."""
    return [
        (f"{prefix}.{key}" if prefix else key, tensors, key)
        for prefix, module in model.named_modules()
        for tensors in (module._parameters, module._buffers)
        for key, tensor in tensors.items()
        if tensor is not None
    ]


def lend(model: nn.Module, stage: nn.Module) -> None:
    """Let a stage compute with the tensors of `model`."""
    own = {name: tensors[key] for name, tensors, key in slots(model)}
    for name, tensors, key in slots(stage):
        tensors[key] = own[name]
