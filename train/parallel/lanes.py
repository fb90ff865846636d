"""Lanes: virtual ranks, so that a step's numbers are the same on any number of processes.

The global batch of a step is `count` equal micro-batches, one a lane. A process computes a contiguous range of lanes one after
the other. The lanes' gradients are summed as one perfect binary tree over all lanes: a process sums its own subtree with a binary
counter of partial sums (`TreeSum`), and the processes' subtrees are added shard by shard after an all-to-all and shared by an
all-gather, which together move as many bytes as a ring all-reduce. So the bracketing is the same wherever a lane is computed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from train.errors import RunError, UsageError


@dataclass(frozen=True)
class Lanes:
    """How many lanes a step has and which of them this process computes."""

    count: int
    rank: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        share = self.count // self.processes
        if self.processes > 1 and (share * self.processes != self.count or share & (share - 1)):
            fits = [n for n in range(2, self.count + 1) if self.count % n == 0 and not (k := self.count // n) & (k - 1)]
            several = f"{', '.join(map(str, fits))} or " if fits else ""
            raise UsageError(
                f"batch.lanes: {self.count} lanes cannot be shared by {self.processes} processes so that the sums keep their "
                f"order. Lanes per process must be a power of two: run on {several}1 process{'es' * bool(fits)}, "
                f"or set batch.lanes to {self.processes} times a power of two."
            )

    @property
    def local(self) -> range:
        share = self.count // self.processes
        return range(self.rank * share, (self.rank + 1) * share)


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


class GradientSum:
    """Sums the lanes' gradients of one model into `parameter.grad`, over the lanes of this process and over all processes.

    Strict sums follow the tree. Fast ones add where they lie and leave the order to the communication library.
    """

    def __init__(self, model: nn.Module, lanes: Lanes, *, strict: bool) -> None:
        outer = getattr(model, "_orig_mod", model)  # within torch.compile's wrapper
        self.parallel = outer if isinstance(outer, DistributedDataParallel) else None
        self.lanes = lanes
        self.strict = strict
        plain = self.parallel.module if self.parallel else outer
        self.parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        self.buffers = LaneBuffers(plain, lanes)
        self._places = {parameter: place for place, parameter in enumerate(self.parameters)}
        self._partials = TreeSum()
        if self.parallel:
            # One thread takes the buckets in their order, so that communication runs beside the backward pass and every process
            # issues the same collectives in the same order.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")
            self.parallel.register_comm_hook(self, _reduce_bucket)
            self.parallel.forward_sync_buffers = False  # the lanes take care of buffers

    @contextmanager
    def lane(self, lane: int, weight: int) -> Iterator[None]:
        """Surround one lane's forward and backward pass. A lane of no weight leaves the buffers alone."""
        last = lane == self.lanes.local[-1]
        self.buffers.start(keep=weight > 0)
        with self.parallel.no_sync() if self.parallel and not last else nullcontext():
            yield
        self.buffers.collect(keep=weight > 0)
        if last and self.parallel:
            self._refuse_unused(self.parallel.module)
        elif last:
            self._partials.finish(self._gradients())
        elif self.strict:
            self._partials.push(self._gradients())
            for parameter in self.parameters:
                parameter.grad = None

    def _refuse_unused(self, model: nn.Module) -> None:
        """DDP would wait for these gradients for ever, and says so one step later and without their names."""
        unused = [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None]
        if unused:
            raise RunError(
                f"{', '.join(unused[:8])}{f' and {len(unused) - 8} more' if len(unused) > 8 else ''}: no part in the loss, which "
                "several processes cannot train. Take them out of the model, freeze them with requires_grad_(False), or let "
                "forward use them in every pass; or run one process."
            )

    def _gradients(self) -> list[Tensor]:
        for parameter in self.parameters:
            if parameter.grad is None:  # no part in this lane's loss
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters]  # type: ignore[misc]  # set just above

    def _merge(self, bucket: GradBucket) -> None:
        """Add the earlier lanes' partial sums to a bucket that holds the last lane's gradients."""
        places = [self._places[parameter] for parameter in bucket.parameters()]
        for partial in self._partials.partials:
            if partial is not None:
                torch._foreach_add_(bucket.gradients(), [partial[place] for place in places])
        if bucket.is_last():
            self._partials.partials.clear()


# DDP reads the annotations, so that they stay objects in this file.
def _reduce_bucket(gradients: GradientSum, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    gradients._merge(bucket)
    flat = bucket.buffer()
    if not gradients.strict:
        work = dist.all_reduce(flat, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
    devices: list[int | str | torch.device] = [flat.device] if flat.is_cuda else []
    result: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

    def reduce() -> None:
        try:
            with torch.cuda.stream(_communication_stream(flat.device)) if flat.is_cuda else nullcontext():
                if ready is not None:
                    ready.wait()
                result.set_result(ordered_all_reduce(flat, gradients.lanes.processes))
        except Exception as error:  # handed to the backward pass, which waits for the result
            result.set_exception(error)  # type: ignore[arg-type]  # the stub asks for a result here

    gradients._thread.submit(reduce)
    return result


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    return _streams.setdefault(device, torch.cuda.Stream(device))


class LaneBuffers:
    """Gives each lane the buffers (BatchNorm's running statistics) of the step's start, and moves them by the lanes' mean move.

    So one that no lane changes keeps its bits. A whole-number buffer (BatchNorm's count of steps) takes the value of the first
    lane that changes it. A lane without weight changes nothing.
    """

    def __init__(self, model: nn.Module, lanes: Lanes) -> None:
        buffers = list(model.buffers())
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
        self._counts = self._first_changed(self._counts, self.others)
        moves = self._moved()
        if self._left:
            self._moves.push(moves)
            return
        self._moves.finish(moves)
        self._restore()
        if self.floats:
            self._move(moves[0])
        if self.others:
            torch._foreach_copy_(self.others, self._agreed(self._counts))

    def _untouched(self, keep: bool) -> bool:
        return not (self.floats or self.others) or (keep and self.lanes.count == 1)

    def _moved(self) -> list[Tensor]:
        """How far the floating-point buffers are from the step's start, as one flat tensor."""
        if not self.floats:
            return []
        now, start = _flat(self.floats), _flat(self._start[: len(self.floats)])
        return [torch.where(now == start, 0, now - start)]

    def _move(self, moves: Tensor) -> None:
        total = ordered_all_reduce(moves, self.lanes.processes) if self.lanes.processes > 1 else moves
        start = _flat(self.floats)
        moved = torch.where(total == 0, start, start + total / self.lanes.count)
        torch._foreach_copy_(self.floats, _like(self.floats, moved))

    def _agreed(self, counts: list[Tensor]) -> list[Tensor]:
        """The same values on all processes: those of the first one that has others than the start."""
        if self.lanes.processes == 1:
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
            buffer.copy_(start)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` in the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
