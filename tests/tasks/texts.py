"""Texts that a test makes itself, a configuration of a small GPT on them, and models whose scores are known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import made

CONFIG = """
task: language_modeling
data: {path: text, context: 16, validation_fraction: 0.2, workers: 0}
model: {name: gpt, depth: 2, width: 16, heads: 2, dropout: 0.1}
optimizer: {name: AdamW, lr: 1e-2, clip_norm: 1.0}
"""


def config(folder: Path) -> str:
    """A configuration for the text in folder/text; it lacks steps or epochs."""
    return made.config(folder, CONFIG)


def words(characters: int) -> str:
    """Lines of words that are always the same."""
    drawn = random.Random(0)
    text = ""
    while len(text) < characters:
        text += drawn.choice(["to", "be", "or", "not", "naïve", "—"]) + drawn.choice(" \n")
    return text[:characters]


def file(folder: Path, characters: int = 1500) -> Path:
    path = folder / "text" / "input.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(words(characters), encoding="utf-8")
    return path


def tokenizer(path: Path, text: str, **options: int) -> Any:
    """A tokenizer of 400 byte pairs and an end of text, as `path` has it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False, **options
    )
    made.train_from_iterator([text], trainer)
    made.enable_truncation(5)  # as published files have it
    made.save(str(path))
    made.no_truncation()
    return made


class Uniform(nn.Module):
    """Each token is as likely as any other."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores.expand(*tokens.shape, -1)


class Short(Uniform):
    """Gives a score for the last place alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[:, -1]
