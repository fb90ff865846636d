"""A model cut over several devices of one process: its later modules lie, and compute, on the next device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from train.parallel.engine import Engine
from train.parallel.parts import refuse_unknown


class SplitEngine(Engine):
    """A module that has weights takes its inputs to their device; one that has none computes where its inputs are."""

    def place(self, model: nn.Module) -> None:
        split = self.options.split
        refuse_unknown(model, split.at, "parallel.split.at")
        devices = iter(split.devices)
        device = torch.device(next(devices))
        for name, module in model.named_modules():  # in the order of their definition, which is mostly that of forward
            if name in split.at:
                device = torch.device(next(devices))
            module._apply(partial(Tensor.to, device=device), recurse=False)  # as `to` does, but for this module's own tensors
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                module.register_forward_pre_hook(partial(_bring, device), with_kwargs=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        prepared: nn.Module = self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared


def _bring(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
