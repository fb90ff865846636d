"""The processes of a run and the few words that they exchange about a step, apart from the gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from train.errors import LockstepError, UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Processes:
    """Which of how many processes this is. Words go over gloo, so that a GPU is never waited for."""

    def __init__(self, accelerator: Accelerator) -> None:
        asked = int(os.environ.get("WORLD_SIZE", "1"))
        if asked != accelerator.num_processes:
            raise UsageError(
                f"{asked} processes were launched, but Accelerate runs this one as 1 of {accelerator.num_processes}: they would "
                "train apart and overwrite each other's files. Check `accelerate env` and the accelerate config in use."
            )
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.group: Any = None
        if self.count > 1:
            self.group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            self.gather(0)  # all are connected before one may refuse and leave

    def apart(self) -> Processes:
        """The same processes with words of their own, for another thread. All must ask for it."""
        others = copy(self)
        if self.count > 1:
            others.group = dist.new_group(backend="gloo")
        return others

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, *numbers: int) -> NDArray[np.int64]:
        """Each process's whole numbers, one row a process."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        if self.group is None:
            return mine.numpy()[None]
        everyone = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).numpy()

    def gather_objects(self, value: Any) -> list[Any]:
        """Each process's value."""
        if self.group is None:
            return [value]
        everyone: list[Any] = [None] * self.count
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def share(self, value: Any) -> Any:
        """The main process's value."""
        return self.gather_objects(value)[0]

    def broadcast(self, value: Any) -> Any:
        """The main process's value, which may be large."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def on_main(self, make: Callable[[], T]) -> T | None:
        """What `make` gives, on the main process alone; its error is everybody's."""
        value, error = None, None
        if self.main:
            try:
                value = make()
            except LockstepError as caught:
                error = caught
        if (failed := self.share(error)) is not None:
            failed.everywhere = True
            raise failed
        return value
