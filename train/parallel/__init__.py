"""How the lanes of a step are computed on the devices and processes that there are, a mode a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.config import Config
from train.parallel.data_parallel import DataParallelEngine
from train.parallel.ddp import DistributedEngine
from train.parallel.engine import Engine
from train.parallel.fsdp import ShardedEngine
from train.parallel.lanes import Lanes
from train.parallel.mode import Mode
from train.parallel.pipeline import PipelineEngine
from train.parallel.split import SplitEngine
from train.parallel.tensor import TensorEngine

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from train.data.loader import Batch
    from train.tasks import Task

ENGINES: dict[str, type[Engine]] = {
    "single": Engine,
    "data_parallel": DataParallelEngine,
    "ddp": DistributedEngine,
    "fsdp": ShardedEngine,
    "split": SplitEngine,
    "tensor": TensorEngine,
    "pipeline": PipelineEngine,
}


def build_engine(
    mode: Mode, model: nn.Module, task: Task, lanes: Lanes, accelerator: Accelerator, config: Config, blank: Batch
) -> Engine:
    """The engine of a mode, with `model` put where it is computed."""
    strict = config.run.determinism == "strict"
    return ENGINES[mode.name](model, task, lanes, accelerator, config.parallel, blank, strict=strict)
