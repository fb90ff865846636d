"""Small GPTs and the loss of their next token; what `train plan` is to forecast and the tests measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet50

from train.data.loader import Batch
from train.models.gpt import model as gpt

VOCABULARY, LENGTH = 512, 128


def small() -> nn.Module:
    return gpt(VOCABULARY, LENGTH, depth=4, width=128, heads=4, dropout=0.1)


def wide() -> nn.Module:
    """Large beside its activations; its head is its own."""
    return gpt(VOCABULARY, LENGTH, depth=2, width=256, heads=4, dropout=0.1, tied=False)


def resnet() -> nn.Module:
    return resnet50(num_classes=10)


class NextToken:
    """`tokens` (N, LENGTH) and `following` (N, LENGTH), int64."""

    def inputs(self, batch: Batch) -> Tensor:
        return batch.fields["tokens"]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), batch.fields["following"].flatten(), reduction="sum")


def sentences(number: int) -> Batch:
    tokens = torch.randint(VOCABULARY, (number, LENGTH))
    return Batch({"tokens": tokens, "following": tokens.roll(-1, 1)}, [])


class Pictures:
    """`image` (N, 3, H, W), float32, and `label` (N), int64."""

    def inputs(self, batch: Batch) -> Tensor:
        return batch.fields["image"]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(output, batch.fields["label"], reduction="sum")


def pictures(number: int, side: int = 224) -> Batch:
    return Batch({"image": torch.rand(number, 3, side, side), "label": torch.randint(10, (number,))}, [])
