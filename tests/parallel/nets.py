"""Models for runs in which a model lies in parts on several processes."""

from __future__ import annotations

from torch import Tensor, nn


def mlp(classes: int, channels: int, width: int = 12) -> nn.Module:
    """Two hidden layers, of which one gives parts and the next takes them, BatchNorm, and a head."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64 * channels, width), nn.ReLU(), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
    )


class Residual(nn.Module):
    """A value goes around the middle layer; one layer has no part in the loss, and one is frozen."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(64 * channels, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, classes)
        self.unused = nn.Linear(3, 3)
        self.first.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        start = self.first(images.flatten(1)).tanh()
        return self.last(self.middle(start) + start)


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(64 * channels, 8)
        self.one = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.last = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.other(self.one(self.first(images.flatten(1)))))


class Branching(nn.Module):
    """Its path depends on the data."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Linear(64 * channels, 8)
        self.last = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        return self.last(hidden if hidden.sum() > 0 else -hidden)
