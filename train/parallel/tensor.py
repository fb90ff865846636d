"""Tensor parallelism: the weight matrices of chosen layers are cut over the processes, which compute every lane together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from train.errors import UsageError
from train.parallel.engine import Engine
from train.parallel.parts import tied, unknown_module

_STYLES: dict[str, Callable[[], ParallelStyle]] = {"columns": ColwiseParallel, "rows": RowwiseParallel}
_DIMENSION = {"columns": 0, "rows": 1}  # of a weight (out, in) that each process has a part of


class TensorEngine(Engine):
    """A layer cut by columns gives each process a part of its outputs, and one by rows takes such parts and adds up; the layers
    that are not named are the same on all processes."""

    together = True
    lists = False

    @property
    def reports(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def place(self, model: nn.Module) -> None:
        super().place(model)
        processes = self.accelerator.num_processes
        plan = _plan(model, self.options.tensor, processes)
        shape = self._outputs(model).shape
        mesh = init_device_mesh(self.accelerator.device.type, (processes,))
        parallelize_module(model, mesh, {name: _STYLES[cut]() for name, cut in plan.items()})
        try:
            problem = "" if self._outputs(model).shape == shape else "the model's output is one process's part"
        except RuntimeError as error:
            problem = str(error)
        if problem:
            raise UsageError(
                f"parallel.tensor: the layers do not fit each other: {problem}. A layer cut by columns gives parts, which the "
                "next one with weights must take: cut that by rows."
            )

    def _outputs(self, model: nn.Module) -> Tensor:
        model.eval()
        with torch.no_grad():
            outputs: Tensor = model(self.task.inputs(self.blank.to(self.accelerator.device)))
        return outputs

    def gradients(self) -> list[Tensor]:
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in super().gradients()]

    def gradient_norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(whole))
        return norm


def _plan(model: nn.Module, wanted: Mapping[str, str], processes: int) -> dict[str, str]:
    """How each layer is cut. UsageError for all that cannot be."""
    modules = dict(model.named_modules())
    plan: dict[str, str] = {}
    problems = [f"parallel.tensor: {names} are one weight, which cannot be cut" for names in tied(model)]
    for pattern, cut in wanted.items():
        found = [name for name in modules if fnmatch(name, pattern)]
        if not found:
            problems.append(unknown_module(pattern, modules, "parallel.tensor"))
        for name in found:
            layer = modules[name]
            if not isinstance(layer, nn.Linear):
                problems.append(f"parallel.tensor: {name} is a {type(layer).__name__}; only Linear layers are cut")
            elif (width := layer.weight.shape[_DIMENSION[cut]]) % processes:
                problems.append(
                    f"parallel.tensor: {name} has {width} {'outputs' if cut == 'columns' else 'inputs'}, which {processes} "
                    "processes cannot share evenly"
                )
            plan[name] = cut
    if problems:
        raise UsageError("\n".join(problems))
    return plan
