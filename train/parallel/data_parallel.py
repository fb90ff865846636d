"""nn.DataParallel: one process that copies the model to each of its GPUs at every pass. For comparison: DDP is faster."""

from __future__ import annotations

from torch import nn

from train.parallel.engine import Engine


class DataParallelEngine(Engine):
    """Each lane's micro-batch is cut over the devices and its scores are gathered on the first, where the loss is computed: so
    every sample counts alike, also where the parts are uneven or a device gets none."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return super().wrap(nn.DataParallel(model))
