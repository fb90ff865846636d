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
            fits = [n for n in range(1, self.count + 1) if self.count % n == 0 and not (k := self.count // n) & (k - 1)]
            raise UsageError(
                f"batch.lanes: {self.count} lanes cannot be shared by {self.processes} processes so that the sums keep their "
                f"order. Lanes per process must be a power of two: run on {', '.join(map(str, fits))} or 1 processes, "
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
        self.model = model
        self.lanes = lanes
        self.strict = strict
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        self.parameters = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        self.buffers = LaneBuffers(plain, lanes)
        self._places = {parameter: place for place, parameter in enumerate(self.parameters)}
        self._partials = TreeSum()
        if isinstance(model, DistributedDataParallel):
            # One thread takes the buckets in their order, so that communication runs beside the backward pass and every process
            # issues the same collectives in the same order.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")
            model.register_comm_hook(self, _reduce_bucket)
            model.forward_sync_buffers = False  # the lanes take care of buffers

    @contextmanager
    def lane(self, lane: int, weight: int) -> Iterator[None]:
        """Surround one lane's forward and backward pass. A lane of no weight leaves the buffers alone."""
        last = lane == self.lanes.local[-1]
        self.buffers.start()
        with nullcontext() if last or not isinstance(self.model, DistributedDataParallel) else self.model.no_sync():
            yield
        self.buffers.collect(keep=weight > 0)
        if last and isinstance(self.model, DistributedDataParallel):
            self._refuse_unused(self.model.module)
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
    """Gives each lane the buffers (BatchNorm's running statistics) of the step's start, and averages what the lanes make of them.

    Whole-number buffers take one lane's value: they count steps, which all lanes agree on.
    """

    def __init__(self, model: nn.Module, lanes: Lanes) -> None:
        buffers = list(model.buffers())
        self.floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        self.others = [buffer for buffer in buffers if not buffer.is_floating_point()]
        self.lanes = lanes
        self.alone = lanes.count == 1 or not buffers
        self._start: list[Tensor] = []
        self._sum = TreeSum()
        self._left = 0

    def start(self) -> None:
        if self.alone:
            return
        if self._left == 0:
            self._left = len(self.lanes.local)
            self._start = [buffer.clone() for buffer in self.floats + self.others]
        else:
            self._restore()

    def collect(self, *, keep: bool) -> None:
        if self.alone:
            return
        if not keep:
            self._restore()
        self._left -= 1
        if self._left:
            self._sum.push([buffer.clone() for buffer in self.floats])
            return
        self._sum.finish(self.floats)
        if self.lanes.processes > 1 and self.floats:
            flat = torch.cat([buffer.flatten() for buffer in self.floats])
            sums = ordered_all_reduce(flat, self.lanes.processes).split([buffer.numel() for buffer in self.floats])
            torch._foreach_copy_(self.floats, [part.view_as(buffer) for part, buffer in zip(sums, self.floats, strict=True)])
        if self.floats:
            torch._foreach_div_(self.floats, float(self.lanes.count))

    def _restore(self) -> None:
        for buffer, start in zip(self.floats + self.others, self._start, strict=True):
            buffer.copy_(start)
