"""Optimizer state in the host's memory. The device has only that of the one parameter that is being updated.

The update itself stays the device's, a parameter at a time, so that its bits stay too. torchao's CPUOffloadOptimizer makes it on
the CPU, with the bits of a CPU and its time, and keeps copies of weights and gradients there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class HostState:
    """Takes the place of an optimizer's `step`. Optimizers that look at one parameter at a time, which all of ours do, make the
    same of it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.update = optimizer, optimizer.step
        self.kept: dict[Tensor, dict[str, Tensor]] = {}  # what lies there between two steps and on the device in them
        self.place = torch.device("cpu")
        optimizer.step = self.step  # type: ignore[method-assign, assignment]

    def step(self, closure: None = None) -> None:
        (group,) = self.optimizer.param_groups
        parameters = group["params"]
        for parameter in parameters:
            group["params"] = [parameter]
            for name, tensor in self.kept.get(parameter, {}).items():
                self.optimizer.state[parameter][name] = tensor.to(parameter.device, copy=True, non_blocking=True)
            self.update()
            self.keep(parameter)
        group["params"] = parameters

    def keep(self, parameter: Tensor) -> None:
        """Bring the parameter's state from its device. What an optimizer keeps elsewhere, and its count, stay where they are."""
        state, kept = self.optimizer.state.get(parameter, {}), self.kept.setdefault(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.device == parameter.device:
                state[name] = kept[name] = kept[name].copy_(value) if name in kept else _moved(value, self.place)


def _moved(tensor: Tensor, place: torch.device) -> Tensor:
    """A copy, in memory that a GPU reads and writes by itself where there is one."""
    copy: Any = tensor.to(place, copy=True)
    return copy.pin_memory() if torch.cuda.is_available() and not is_traceable_wrapper_subclass(copy) else copy  # type: ignore[no-any-return]
