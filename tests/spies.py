"""Models that note what they are given, for runs with `model.name=tests.spies:NAME`.

The file that SPY_LOG names gets a line for each forward pass in training mode: the process's rank, the numbers of the samples
(of `tests.made`), a digest of each sample's pixels, and what `Draws` has written into them. SPY_KILL=N ends the process of rank
SPY_KILL_RANK (0) by SIGKILL in its N-th such pass, after the save that is under way.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from train.models import digits_cnn
from train.saving import Saver


def ids_of(images: Tensor) -> list[int]:
    """The numbers of samples made by `tests.made`, as the model sees them with `made.CONFIG`."""
    return (images[:, 0].amax((1, 2)).double() * 255).round().int().tolist()


class Spy(nn.Module):
    """Linear; `norm` and `dropout` give it state and randomness, `zero` weights that are known."""

    def __init__(
        self, classes: int, channels: int, side: int = 8, norm: bool = False, dropout: float = 0.0, zero: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(channels * side * side, classes)
        self.passes = 0
        if zero:
            nn.init.zeros_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.note(images)
        return self.linear(self.dropout(self.norm(images).flatten(1)))

    def note(self, images: Tensor) -> None:
        self.passes += 1
        kill_in_pass(self.passes)
        if log := os.environ.get("SPY_LOG"):
            digests = [hashlib.sha1(image.numpy().tobytes()).hexdigest()[:12] for image in images]
            drawn = (images[:, 1, -1, :4].double() * 255).round().int().tolist()
            line = json.dumps({"rank": rank(), "ids": ids_of(images), "pixels": digests, "drawn": drawn})
            with Path(log).open("a") as file:
                file.write(line + "\n")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def kill_in_pass(number: int) -> None:
    if number == int(os.environ.get("SPY_KILL", "0")) and rank() == int(os.environ.get("SPY_KILL_RANK", "0")):
        for thing in gc.get_objects():
            if isinstance(thing, Saver):  # so that a test knows which checkpoint is there
                thing.settle()
        os.kill(os.getpid(), signal.SIGKILL)


def digits(classes: int, channels: int) -> nn.Module:
    """The shipped model, which can be killed."""
    model = digits_cnn.model(classes=classes, channels=channels)
    numbers = itertools.count(1)
    model.register_forward_pre_hook(lambda module, inputs: kill_in_pass(next(numbers)) if module.training else None)
    return model


class Draws:
    """A fork's transform, with no base class: writes what each usual generator gives it into the last row of a picture."""

    def __call__(self, picture: Tensor) -> Tensor:
        drawn = [
            random.randrange(256),
            int(np.random.randint(256)),
            int(np.random.default_rng(torch.initial_seed()).integers(256)),
            int(torch.randint(256, ())),
        ]
        picture = picture.clone()
        picture[1, -1, :4] = torch.tensor(drawn, dtype=torch.uint8)
        return picture


class Known(nn.Module):
    """Two classes, and a loss of i for sample i when its label is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        number = torch.tensor(ids_of(images), dtype=torch.float64)
        other = torch.log(torch.expm1(number)).clamp(-100)  # log(1 + e^other) is the number
        return torch.stack([torch.zeros_like(other), other], 1).float() + self.unused


class Wide(nn.Module):
    """Has a gradient that is a sum over many numbers, which CPU threads would share out among themselves."""

    def __init__(self, classes: int, channels: int, side: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(channels * side * side, classes)
        self.scale = nn.Parameter(torch.ones(()))
        self.numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0))

    def forward(self, images: Tensor) -> Tensor:
        scores = self.linear(images.flatten(1))
        first, *others = scores.unbind(1)
        return torch.stack([first + (self.scale * self.numbers).sum() / 1000, *others], 1)


class Unsteady(Spy):
    """Uses an operation that has no deterministic form, for places that occur twice."""

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = super().forward(images)
        return scores + torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0])).sum()


class Spread:
    """Divides a picture by the spread of a large one made of it, whose sum several threads, where there are any, add in parts."""

    def __call__(self, picture: Tensor) -> Tensor:
        large = picture.float().sqrt().repeat(1, 200, 200)
        return picture.float() / large.std()
