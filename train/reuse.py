"""Memory of large CPU tensors that is used again, where malloc would give it back and be given it anew, page by page."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from train.determinism import KEPT


class Reused:
    """Gives new tensors, of which a large one lies where one was that nothing holds any more: no view, and no backward pass."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty(self, shape: torch.Size, device: torch.device, memory_format: torch.memory_format) -> Tensor:
        """An uninitialised float32 tensor."""
        large = device.type == "cpu" and shape.numel() * 4 >= KEPT
        if not large:
            return torch.empty(shape, device=device, memory_format=memory_format)
        memory = self._memory(shape.numel())
        if type(memory) is not Tensor:  # where a step is traced; it has none
            return torch.empty(shape, memory_format=memory_format)
        held = memory.numpy()  # by the tensor that is given, and by all that share its storage
        weakref.finalize(held, self._free.append, memory)
        strides = torch.empty(shape, device="meta", memory_format=memory_format).stride()
        return torch.from_numpy(held).as_strided(shape, strides)

    def _memory(self, numbers: int) -> Tensor:
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
            if memory.numel() == numbers:
                return memory
            self._free.clear()  # a batch of another size follows, and mostly more like it
        return torch.empty(numbers)
