"""Language modelling: each token of a text from those before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from train.config import Config, Data
from train.data import tokens
from train.data.loader import Batch
from train.data.source import Sources
from train.data.text import open_text
from train.data.tokens import Tokenizer
from train.errors import UsageError


class BlockDecoder:
    """A row with the bytes of `tokens` to a sample with `tokens` (context + 1), int64."""

    def __init__(self, vocabulary: int) -> None:
        self.dtype = tokens.dtype(vocabulary)

    def __call__(self, row: dict[str, Any], epoch: int, key: int) -> dict[str, Tensor]:
        return {"tokens": torch.from_numpy(np.frombuffer(row["tokens"], self.dtype).astype(np.int64))}


class LanguageModeling:
    """Cross-entropy of the next token, in nats; a batch counts by the tokens that are predicted."""

    keys: ClassVar[frozenset[str]] = frozenset({"text_column", "tokenizer", "separator", "context"})

    def __init__(self, data: Data, sources: Sources, tokenizer: Tokenizer, device: torch.device) -> None:
        self.sources, self.device = sources, device
        self.vocabulary, self.context = tokenizer.vocabulary, data.context
        self.of_bytes = data.tokenizer == "bytes"
        self.given: Mapping[str, int] = {"vocabulary": self.vocabulary, "context": self.context}
        self.identity: Mapping[str, Any] = {"tokenizer": tokenizer.identity}

    @classmethod
    def open(cls, config: Config, device: torch.device, say: Callable[[str], None]) -> LanguageModeling:
        return cls(config.data, *open_text(config.data, say), device)

    @staticmethod
    def metrics(data: Data) -> Mapping[str, bool]:
        return {"loss": False, "bits_per_byte" if data.tokenizer == "bytes" else "perplexity": False, "accuracy": True}

    def decoder(self, seed: int, *, training: bool) -> BlockDecoder:
        return BlockDecoder(self.vocabulary)

    def weight(self, batch: Batch) -> int:
        return len(batch.keys) * self.context

    def fits(self, model: nn.Module, batch: Batch, name: str) -> None:
        """Raise UsageError when the model cannot take such blocks, or gives other than a score for each token at each place."""
        model.eval()
        try:
            with torch.no_grad():
                scores = model(self.inputs(batch))  # where the model is still
        except (RuntimeError, IndexError, TypeError) as error:
            raise UsageError(
                f"model.name: {name} cannot take tokens, int64 of the shape (1, {self.context}) (samples, context): {error}"
            ) from error
        wanted = (1, self.context, self.vocabulary)
        if scores.shape != wanted:
            raise UsageError(
                f"model.name: {name} gives {tuple(scores.shape)} for a sample; wanted are {wanted}: a score for each of the "
                f"{self.vocabulary} tokens at each of {self.context} places"
            )

    def inputs(self, batch: Batch) -> Tensor:
        """int64 (N, context)."""
        return batch.fields["tokens"][:, :-1]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), _targets(output, batch), reduction="sum")

    def sums(self, output: Any, batch: Batch) -> Mapping[str, float]:
        scores, targets = output.flatten(0, 1), _targets(output, batch)
        losses = functional.cross_entropy(scores.float(), targets, reduction="none")
        return {"loss": float(losses.double().sum()), "accuracy": float((scores.argmax(1) == targets).sum())}

    def measured(self, means: Mapping[str, float]) -> dict[str, float]:
        """Perplexity is e to the loss; of bytes, bits are said instead."""
        loss = means["loss"]
        other = {"bits_per_byte": loss / math.log(2)} if self.of_bytes else {"perplexity": float(np.exp(loss))}
        return {**means, **other}


def _targets(output: Tensor, batch: Batch) -> Tensor:
    """The token after each place, int64 (N x context), where the outputs are."""
    return batch.fields["tokens"][:, 1:].flatten().to(output.device)
