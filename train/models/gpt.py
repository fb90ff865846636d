"""GPT-2's decoder (Radford et al. 2019): pre-norm blocks of causal attention and an MLP over learned positions.

Each projection is a layer of its own, so that tensor parallelism may cut them:
`parallel.tensor: {blocks.*.query: columns, blocks.*.key: columns, blocks.*.value: columns, blocks.*.joined: rows, ...}`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Of each token to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.dropout = width // heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.joined = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        parts = (part(hidden) for part in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        joined: Tensor = self.joined(attended.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.mlp_norm, self.widened, self.narrowed = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        inner = functional.gelu(self.widened(self.mlp_norm(hidden)), approximate="tanh")
        added: Tensor = self.dropout(self.narrowed(inner))
        return hidden + added


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, depth: int, width: int, heads: int, dropout: float, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._initialise(depth)

    def _initialise(self, depth: int) -> None:
        """As GPT-2 does: what is added to the residual stream starts smaller, by the square root of how many add to it."""
        for name, parameter in self.named_parameters():
            if name == "positions":
                nn.init.normal_(parameter, std=0.01)
            elif name.endswith(("joined.weight", "narrowed.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (N, T), T up to the context, to scores (N, T, vocabulary) of the token after each."""
        hidden = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        scores: Tensor = self.head(self.norm(self.blocks(hidden)))
        return scores


def model(
    vocabulary: int,
    context: int,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Module:
    """The defaults are GPT-2's smallest, 124,439,808 parameters with its 50,257 tokens and a context of 1,024. `tied`: the head's
    weights are those of the tokens, which a pipeline cannot have."""
    if min(depth, width, heads) < 1:
        raise ValueError(f"depth {depth}, width {width} and heads {heads} must be 1 or more")
    if width % heads:
        raise ValueError(f"width {width} cannot be shared by {heads} heads")
    return GPT(vocabulary, context, depth, width, heads, dropout, tied=tied)
