"""Models whose random numbers the threads of a group cannot have for themselves, and one that notes what it is forked beside."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

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


class DrawsSeldom(Spy):
    """Doubles its scores in one of fifty passes, which a single step need not show."""

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = super().forward(images)
        return scores * 2 if random.random() < 0.02 else scores


class NotesForks(Spy):
    """SPY_FORKS is the file that gets a line for each fork of its process: the threads beside it."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(classes, channels)
        os.register_at_fork(before=note_threads)


def note_threads() -> None:
    with Path(os.environ["SPY_FORKS"]).open("a") as file:
        file.write(f"{' '.join(thread.name for thread in threading.enumerate())}\n")
