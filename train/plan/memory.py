"""How many bytes the tensors on a device take, by what they are for, and how many they take at most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

Kind = Literal["weights", "gradients", "optimizer state", "averaged weights", "activations"]


class Memory(TorchDispatchMode):
    """Counts each storage that an operation makes, from then until nothing holds it: `now`, `peak` when there was most, and
    `most_activations` of that kind alone.

    The same is counted by torch.distributed._tools.mem_tracker.MemTracker. It refuses a model that is called twice, as lanes
    call it, and takes three times as long for what it keeps of each module.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations for it
        self.device = device.type
        self.now: Counter[Kind] = Counter()
        self.peak: Counter[Kind] = Counter()
        self.most_activations = 0
        self._storages: dict[int, tuple[Kind, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such as a quantised state, which then computes with the tensors that it consists of
        result = func(*args, **(kwargs or {}))
        self.mark((value for value in tree_iter(result) if isinstance(value, Tensor)), None)
        return result

    def mark(self, tensors: Iterable[Tensor], kind: Kind | None) -> None:
        """Count the storages of some tensors as of a kind; None leaves those that are known as they are."""
        for tensor in tensors:
            if tensor.device.type != self.device:
                continue
            storage = tensor.untyped_storage()  # the same object as long as it lives
            known = self._storages.get(id(storage))
            if known is None:
                weakref.finalize(storage, self._gone, id(storage)).atexit = False
            elif kind is None:
                continue
            else:
                self.now[known[0]] -= known[1]
            self._storages[id(storage)] = kind or "activations", storage.nbytes()
            self.now[kind or "activations"] += storage.nbytes()
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()
        self.most_activations = max(self.most_activations, self.now["activations"])

    def restart(self) -> None:
        """Let the peaks be those of what follows."""
        self.peak, self.most_activations = self.now.copy(), self.now["activations"]

    def _gone(self, storage: int) -> None:
        kind, size = self._storages.pop(storage)
        self.now[kind] -= size
