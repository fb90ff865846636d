"""DistributedDataParallel: each process has the whole model and lanes of its own; gradients are added as they become ready."""

# DDP reads the annotations of the hook, so that they stay objects in this file: no `from __future__ import annotations`.
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from train.errors import RunError
from train.parallel.engine import Engine
from train.parallel.lanes import ordered_all_reduce


class DistributedEngine(Engine):
    """A process adds its lanes' gradients into DDP's buckets, whose sums over the processes overlap with the backward pass."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        assert isinstance(wrapped, DistributedDataParallel)
        self.ddp = wrapped
        # One thread takes the buckets in their order, so that communication runs beside the backward pass and every process
        # issues the same collectives in the same order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="all-reduce")
        self.ddp.register_comm_hook(self, _reduce_bucket)
        self.ddp.forward_sync_buffers = False  # the lanes take care of buffers
        trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._places = {parameter: place for place, parameter in enumerate(trained)}
        return wrapped

    @contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        if last:
            yield
            self._refuse_unused()
            return
        with self.ddp.no_sync(), super().adding(last=False):
            yield

    def merge(self, bucket: GradBucket) -> None:
        """Add the earlier lanes' partial sums to a bucket that holds the last lane's gradients."""
        gradients, places = _gradients(bucket), [self._places[parameter] for parameter in bucket.parameters()]
        for partial in self.partials.partials:
            if partial is not None:
                torch._foreach_add_(gradients, [partial[place] for place in places])
        if bucket.is_last():
            self.partials.partials.clear()

    def reduce(self, flat: Tensor, result: torch.futures.Future[Tensor]) -> None:
        """Start the ordered sum of a bucket over the processes on the thread for it."""
        ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None

        def run() -> None:
            try:
                with torch.cuda.stream(_communication_stream(flat.device)) if flat.is_cuda else nullcontext():
                    if ready is not None:
                        ready.wait()
                    result.set_result(ordered_all_reduce(flat, self.lanes.processes))
            except Exception as error:  # handed to the backward pass, which waits for the result
                result.set_exception(error)  # type: ignore[arg-type]  # the stub asks for a result here

        self._thread.submit(run)

    def _refuse_unused(self) -> None:
        """DDP would wait for these gradients for ever, and says so one step later and without their names."""
        unused = [name for name, value in self.plain.named_parameters() if value.requires_grad and value.grad is None]
        if unused:
            raise RunError(
                f"{', '.join(unused[:8])}{f' and {len(unused) - 8} more' if len(unused) > 8 else ''}: no part in the loss, which "
                "several processes cannot train. Take them out of the model, freeze them with requires_grad_(False), or let "
                "forward use them in every pass; or run one process."
            )


def _gradients(bucket: GradBucket) -> list[Tensor]:
    """The gradients in a bucket in the memory order of their parameters, which `bucket.gradients()` takes to be C order."""
    parts = bucket.buffer().split([parameter.numel() for parameter in bucket.parameters()])
    return [part.as_strided(like.size(), like.stride()) for part, like in zip(parts, bucket.parameters(), strict=True)]


def _reduce_bucket(engine: DistributedEngine, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    engine.merge(bucket)
    flat = bucket.buffer()
    if not engine.strict:
        work = dist.all_reduce(flat, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
    devices: list[int | str | torch.device] = [flat.device] if flat.is_cuda else []
    result: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    engine.reduce(flat, result)
    return result


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _communication_stream(device: torch.device) -> torch.cuda.Stream:
    return _streams.setdefault(device, torch.cuda.Stream(device))
