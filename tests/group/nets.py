"""Models whose random numbers the threads of a group cannot have for themselves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.spies import Spy


class DrawsFromNumpy(Spy):
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = super().forward(images)
        return scores * np.random.random()


class DrawsWithoutGenerator(Spy):
    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = super().forward(images)
        return scores * torch.rand(())
