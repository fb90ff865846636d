"""How the lanes of a step are computed on the devices and processes that there are, a mode a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.arguments import imported
from train.config import Config
from train.parallel.engine import Engine
from train.parallel.lanes import Lanes
from train.parallel.mode import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from train.data.loader import Batch
    from train.tasks import Task

_ENGINES = {  # imported where they are used: some take a second
    "single": "engine:Engine",
    "data_parallel": "data_parallel:DataParallelEngine",
    "ddp": "ddp:DistributedEngine",
    "fsdp": "fsdp:ShardedEngine",
    "split": "split:SplitEngine",
    "tensor": "tensor:TensorEngine",
    "pipeline": "pipeline:PipelineEngine",
}


def engine_of(mode: Mode) -> type[Engine]:
    found: type[Engine] = imported(f"{__name__}.{_ENGINES[mode.name]}")  # type: ignore[assignment]  # a class
    return found


def build_engine(
    mode: Mode, model: nn.Module, task: Task, lanes: Lanes, accelerator: Accelerator, config: Config, blank: Batch
) -> Engine:
    """The engine of a mode, with `model` put where it is computed."""
    strict = config.run.determinism == "strict"
    return engine_of(mode)(model, task, lanes, accelerator, config.parallel, blank, strict=strict)
