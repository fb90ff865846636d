"""A small GPT as nanoGPT builds it, and the loss of its next token; what `train plan` is to forecast and the tests measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import resnet50

from train.data.loader import Batch

VOCABULARY, LENGTH = 512, 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention(self.before_attention(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.before_mlp(hidden))


class GPT(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def wide() -> nn.Module:
    """Large beside its activations; its head is its own."""
    model = GPT(width=256, depth=2)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


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
