"""What a step computes with and changes: the model in its engine, the optimizer, and the averaged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from train import switches
from train.config import Config
from train.data.loader import Batch
from train.offload import HostState
from train.optim import build_optimizer
from train.parallel import build_engine
from train.parallel.lanes import Lanes
from train.parallel.launch import Launch
from train.parallel.mode import Mode
from train.profiling.labels import labelled
from train.tasks import Task

if TYPE_CHECKING:
    from accelerate import Accelerator


class Learner:
    """One process's. `blank` is of a micro-batch's shape."""

    def __init__(
        self,
        config: Config,
        mode: Mode,
        launch: Launch,
        model: nn.Module,
        task: Task,
        lanes: Lanes,
        accelerator: Accelerator,
        blank: Batch,
    ) -> None:
        self.accelerator, self.clip_norm, decay = accelerator, config.optimizer.clip_norm, config.ema.decay
        self.average = AveragedModel(model) if decay else None  # before the engine wraps or cuts the model
        switches.fit(model, config.speed, launch)
        self.engine = build_engine(mode, model, task, lanes, accelerator, config, blank)
        if self.average is not None and decay:
            self.engine.place(self.average.module)
            if self.engine.lists:
                self.average.multi_avg_fn = get_ema_multi_avg_fn(decay)
            else:
                self.average.avg_fn = get_ema_avg_fn(decay)
        compiled = launch.compiler != "no"
        optimizer = build_optimizer(config.optimizer, self.engine.plain, lists=self.engine.lists, compiled=compiled)
        self.host = HostState(optimizer) if config.speed.offload == "optimizer" else None
        self.optimizer = accelerator.prepare_optimizer(optimizer)

    def keep(self, parameter: Tensor) -> None:
        """Put the optimizer state of a parameter, on the device, where it belongs between two steps."""
        if self.host is not None:
            self.host.keep(parameter)

    @labelled("optimizer")
    def clip(self) -> Tensor:
        """The norm of the whole gradient, before it is clipped where the config asks for that."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients(self.optimizer)
        norm = self.engine.gradient_norm()
        if self.clip_norm is not None:
            foreach = None if self.engine.lists else False
            nn.utils.clip_grads_with_norm_(self.engine.parameters, self.clip_norm, norm, foreach=foreach)
        return norm

    @labelled("optimizer")
    def update(self) -> None:
        """Let the weights, and their average, take up the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.engine.plain)
