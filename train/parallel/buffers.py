"""BatchNorm's running statistics and other buffers, so that a step leaves the same ones on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.lanes import Lanes, TreeSum, ordered_all_reduce


class LaneBuffers:
    """Gives each lane the buffers (BatchNorm's running statistics) of the step's start, and moves them by the lanes' mean move.

    So one that no lane changes keeps its bits. A whole-number buffer (BatchNorm's count of steps) takes the value of the first
    lane that changes it. A lane without weight changes nothing.
    """

    def __init__(self, model: nn.Module, lanes: Lanes) -> None:
        buffers = [buffer for buffer in model.buffers() if not buffer.is_meta]
        self.floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self.others = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self.lanes = lanes
        self._start: list[Tensor] = []
        self._moves = TreeSum()
        self._counts: list[Tensor] = []
        self._left = 0

    def start(self, *, keep: bool) -> None:
        """Before a lane; `keep` is whether it has weight."""
        if self._untouched(keep):
            return
        if self._left == 0:
            self._left = len(self.lanes.local)
            self._start = [buffer.clone() for buffer in self.floats + self.others]
            self._counts = self._start[len(self.floats) :]
        else:
            self._restore()

    def collect(self, *, keep: bool) -> None:
        """After the lane."""
        if self._untouched(keep):
            return
        if not keep:
            self._restore()
        self._left -= 1
        moves, counts = self._moved(), self.others
        if self.lanes.interleaved:
            moves, counts = self._added(moves), self._agreed(counts)
        self._counts = self._first_changed(self._counts, counts)
        if self._left:
            self._moves.push(moves)
            return
        self._moves.finish(moves)
        self._restore()
        if not self.lanes.interleaved:
            moves, self._counts = self._added(moves), self._agreed(self._counts)
        for total in moves:
            start = _flat(self.floats)
            moved = torch.where(total == 0, start, start + total / self.lanes.count)
            torch._foreach_copy_([buffer.data for buffer in self.floats], _like(self.floats, moved))
        if self.others:
            torch._foreach_copy_([buffer.data for buffer in self.others], self._counts)

    def _untouched(self, keep: bool) -> bool:
        return not (self.floats or self.others) or (keep and self.lanes.count == 1)

    def _moved(self) -> list[Tensor]:
        """How far the floating-point buffers are from the step's start, as one flat tensor."""
        if not self.floats:
            return []
        now, start = _flat(self.floats), _flat(self._start[: len(self.floats)])
        return [torch.where(now == start, 0, now - start)]

    def _added(self, moves: list[Tensor]) -> list[Tensor]:
        return [ordered_all_reduce(move, self.lanes.processes) for move in moves] if self.lanes.processes > 1 else moves

    def _agreed(self, counts: list[Tensor]) -> list[Tensor]:
        """The same values on all processes: those of the first one that has others than the start."""
        if self.lanes.processes == 1 or not counts:
            return counts
        mine = _flat([count.long() for count in counts])
        everyone = mine.new_empty(self.lanes.processes, mine.numel())
        dist.all_gather_single(everyone.view(-1), mine)
        for theirs in everyone:
            counts = self._first_changed(counts, _like(counts, theirs))
        return counts

    def _first_changed(self, chosen: list[Tensor], now: list[Tensor]) -> list[Tensor]:
        start = self._start[len(self.floats) :]
        return [torch.where(old == begin, new, old) for old, begin, new in zip(chosen, start, now, strict=True)]

    def _restore(self) -> None:
        for buffer, start in zip(self.floats + self.others, self._start, strict=True):
            buffer.data.copy_(start)  # behind the back of autograd: backward passes of a pipeline's lanes are still to come


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(tensors[0].device) for tensor in tensors])


def _like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
