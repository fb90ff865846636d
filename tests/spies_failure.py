"""Models that are slow, or go wrong at a chosen sample, for runs with `model.name=tests.spies_failure:NAME`.

Samples are told apart by the red channel, which `tests.made` fills with a sample's number.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from tests.spies import ids_of


class Linear(nn.Module):
    """The plainest model, or with `width` one of some size. SPY_SECONDS and SPY_EVALUATION_SECONDS are how long a pass takes."""

    def __init__(self, classes: int, channels: int, width: int = 0) -> None:
        super().__init__()
        inner = [nn.Linear(channels * 16, width), nn.Linear(width, width)] if width else []
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), *inner, nn.Linear(width or channels * 16, classes))

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("SPY_SECONDS" if self.training else "SPY_EVALUATION_SECONDS", "0")))
        return self.layers(images)


class Averaging(Linear):
    """Scales its scores by a mean over so many numbers that several threads, where there are any, add them in parts."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(classes, channels)
        self.numbers = nn.Parameter(torch.randn(2_000_000))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.numbers.mean() * 1000


class Infinite(Linear):
    """Gives infinite scores to the sample `bad`."""

    def __init__(self, classes: int, channels: int, bad: int) -> None:
        super().__init__(classes, channels)
        self.bad = bad

    def forward(self, images: Tensor) -> Tensor:
        scale = torch.tensor([float("inf") if number == self.bad else 1.0 for number in ids_of(images)])
        return super().forward(images) * scale[:, None] if self.training else super().forward(images)


class Refusing(Linear):
    """Raises an error of its own at the sample `bad`, as a mistake in a fork's model does."""

    def __init__(self, classes: int, channels: int, bad: int) -> None:
        super().__init__(classes, channels)
        self.bad = bad

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.bad in ids_of(images):
            raise KeyError("a mistake in the model")
        return super().forward(images)


class Frozen(nn.Module):
    """A backbone that is not trained, below a head that is."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.backbone = Linear(classes, channels).requires_grad_(False)
        self.head = nn.Linear(classes, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


class Unused(Frozen):
    """With a layer that has no part in the loss: in no step, or with `sometimes` in every second pass."""

    def __init__(self, classes: int, channels: int, sometimes: bool = False) -> None:
        super().__init__(classes, channels)
        self.extra = nn.Linear(classes, classes)
        self.sometimes = sometimes
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        if self.training:
            self.passes += 1
        return self.extra(scores) if self.sometimes and self.passes % 2 else scores


class LateOnOne(Linear):
    """Comes late on the second process, as one whose disk or machine is slower does."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(classes, channels)
        if os.environ.get("RANK") == "1":
            time.sleep(0.7)
