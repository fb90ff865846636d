"""Models that are slow, or go wrong at a chosen sample, for runs with `model.name=tests.spies_failure:NAME`.

Samples are told apart by the red channel, which `tests.made` fills with a sample's number.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

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


class Hungry(Linear):
    """Asks for `gib` of memory a sample, with `room` in a process that may have so many GiB more addresses than it begins with.

    From its pass number `after` on, in training or in `evaluation`, and with `rank` on that process alone.
    """

    def __init__(
        self,
        classes: int,
        channels: int,
        gib: float,
        room: float | None = None,
        after: int = 1,
        evaluation: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__(classes, channels)
        self.gib, self.after, self.evaluation, self.passes = gib, after, evaluation, 0
        if rank is not None and str(rank) != os.environ.get("RANK", "0"):
            self.gib = 0
        elif room is not None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            limit = used + int(room * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        if self.training != self.evaluation and self.passes >= self.after:
            torch.empty(int(len(images) * self.gib * 2**30), dtype=torch.uint8, device=images.device)
        return super().forward(images)


def odd_as_float() -> Callable[[Tensor], Tensor]:
    """A transform that makes floating-point numbers of the bytes of every other sample."""
    return lambda picture: picture.float() if int(picture[0].max()) % 2 else picture


class SlowPicture(nn.Module):
    """A transform that takes SPY_SAMPLE_SECONDS for a picture."""

    def forward(self, image: Tensor) -> Tensor:
        time.sleep(float(os.environ["SPY_SAMPLE_SECONDS"]))
        return image
