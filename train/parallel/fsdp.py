"""Fully sharded data parallelism (FSDP2): each process keeps a part of every weight, its gradient and its optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter  # what set_custom_reduce_scatter takes

from train.parallel.engine import Engine
from train.parallel.lanes import tree_sum
from train.parallel.norm import rows, total
from train.parallel.units import units

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class OrderedReduceScatter(ReduceScatter):
    """Sums shards over the processes by the lanes' tree; moves as many bytes as the library's."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(tree_sum(received.view(group.size(), -1).unbind()))


class ShardedEngine(Engine):
    """Each lane's gradients are added over the processes as its backward pass makes them, and then, shard by shard, over the
    lanes: with interleaved lanes that is DDP's tree."""

    together = True

    def place(self, model: nn.Module) -> None:
        super().place(model)
        mesh = init_device_mesh(self.accelerator.device.type, (self.lanes.processes,))
        options, wanted = _options(model)
        for unit in units(model, wanted):
            fully_shard(unit, mesh=mesh, **options)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided by the weight of all lanes
                module.set_force_sum_reduction_for_comms(True)
                if self.strict:
                    module.set_custom_reduce_scatter(OrderedReduceScatter())

    def gradients(self) -> list[Tensor]:
        """The shards of this process; the sums over the processes have come with the backward pass."""
        return [_local(gradient) for gradient in super().gradients()]

    def gradient_norm(self) -> Tensor:
        gradients: list[DTensor] = [parameter.grad for parameter in self.parameters if parameter.grad is not None]  # type: ignore[misc]
        counts = [len(gradient) if gradient.dim() else 1 for gradient in gradients]
        shares = [-(-count // self.lanes.processes) for count in counts]  # rows of a shard, the last ones shorter
        norms = [rows(_local(gradient)) for gradient in gradients]
        padded = [nn.functional.pad(norm, (0, share - len(norm))) for norm, share in zip(norms, shares, strict=True)]
        mine = torch.cat(padded)
        everyone = mine.new_empty(self.lanes.processes, len(mine))
        dist.all_gather_single(everyone.view(-1), mine)
        whole = everyone.split(shares, dim=1)
        return total([part.reshape(-1)[:count] for part, count in zip(whole, counts, strict=True)])


def _options(model: nn.Module) -> tuple[dict[str, Any], Any]:
    """What the accelerate config says of FSDP, as `fully_shard` takes it, and its wrap policy."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_auto_wrap_policy(model)
    options = {"reshard_after_forward": plugin.reshard_after_forward}
    if plugin.cpu_offload:
        options["offload_policy"] = plugin.cpu_offload
    return options, fsdp2_prepare_auto_wrap_policy(plugin, model)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local()  # type: ignore[attr-defined, no-any-return]  # a DTensor
