"""Lanes: virtual ranks, so that a step's numbers are the same on any number of processes.

The global batch of a step is `count` equal micro-batches, one a lane. A process computes a contiguous range of lanes one after
the other. The lanes' gradients are summed as one perfect binary tree over all lanes: a process sums its own subtree with a binary
counter of partial sums (`TreeSum`), and the processes' subtrees are added shard by shard after an all-to-all and shared by an
all-gather, which together move as many bytes as a ring all-reduce. So the bracketing is the same wherever a lane is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.errors import UsageError


@dataclass(frozen=True)
class Lanes:
    """How many lanes a step has and which of them this process computes: neighbours, whose sum it makes before the processes'
    sums are added; or, `interleaved`, every `processes`-th, where each round of neighbours is added over the processes first."""

    count: int
    rank: int = 0
    processes: int = 1
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self._fits(self.processes):
            fits = [str(number) for number in range(2, self.count + 1) if self._fits(number)]
            several = f"{', '.join(fits)} or " if fits else ""
            rule = "The number of processes" if self.interleaved else "Lanes per process"
            raise UsageError(
                f"batch.lanes: {self.count} lanes cannot be shared by {self.processes} processes so that the sums keep their "
                f"order. {rule} must be a power of two: run on {several}1 process{'es' * bool(fits)}, "
                f"or set batch.lanes to {self.processes} times a power of two."
            )

    def _fits(self, processes: int) -> bool:
        share, rest = divmod(self.count, processes)
        power = processes if self.interleaved else share
        return processes == 1 or (rest == 0 and not power & (power - 1))

    @property
    def local(self) -> range:
        if self.interleaved:
            return range(self.rank, self.count, self.processes)
        share = self.count // self.processes
        return range(self.rank * share, (self.rank + 1) * share)


def sharing_problem(lanes: int, processes: int, *, interleaved: bool = False) -> str | None:
    """Why so many processes cannot share the lanes, or None."""
    try:
        Lanes(lanes, 0, processes, interleaved)
    except UsageError as error:
        return str(error)
    return None


class TreeSum:
    """Adds lists of tensors in the order of a perfect binary tree, keeping log2(n) partial sums."""

    def __init__(self) -> None:
        self.partials: list[list[Tensor] | None] = []

    def push(self, values: list[Tensor]) -> None:
        """Take one leaf; its tensors belong to the sum from here on."""
        for level, partial in enumerate(self.partials):
            if partial is None:
                self.partials[level] = values
                return
            torch._foreach_add_(values, partial)
            self.partials[level] = None
        self.partials.append(values)

    def total(self) -> list[Tensor]:
        """The sum of all leaves pushed, which there are."""
        sums = [partial for partial in self.partials if partial is not None]
        for partial in sums[1:]:
            torch._foreach_add_(sums[0], partial)
        self.partials.clear()
        return sums[0]

    def finish(self, last: list[Tensor]) -> None:
        """Add all leaves pushed so far to the last one, in place, and start anew."""
        for partial in self.partials:
            if partial is not None:
                torch._foreach_add_(last, partial)
        self.partials.clear()


def tree_sum(values: Sequence[Tensor]) -> Tensor:
    """The sum of some tensors of one shape with the bracketing of `TreeSum`; the inputs are used up."""
    total = TreeSum()
    for value in values[:-1]:
        total.push([value])
    total.finish([values[-1]])
    return values[-1]


def ordered_all_reduce(flat: Tensor, processes: int) -> Tensor:
    """Sum a one-dimensional tensor over the processes, with the same bracketing for every element."""
    length = -(-flat.numel() // processes)
    parts = flat if flat.numel() == length * processes else nn.functional.pad(flat, (0, length * processes - flat.numel()))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    shard = tree_sum(received.view(processes, length).unbind())
    dist.all_gather_single(received, shard)
    return received[: flat.numel()]
