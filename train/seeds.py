"""Stateless randomness: every generator is seeded by what is about to be computed, so that none has a state worth saving."""

from __future__ import annotations

import random
from contextvars import ContextVar

import numpy as np
import torch

from train.data.order import key

_LANE, _SAMPLE = 0, 1  # what a number is drawn for, so that a lane and a sample never share theirs

# A thread's own generator, where several compute at the same time: those of the process are for one.
OWN_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("own_generator", default=None)


def seed_lane(seed: int, step: int, lane: int) -> None:
    """Let everything random in this lane's forward pass be a function of (seed, step, lane)."""
    seed_generators(key(_LANE, seed, step, lane))


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Let everything random in a sample's transforms be a function of (seed, epoch, sample key)."""
    seed_generators(key(_SAMPLE, seed, epoch, sample))


def seed_generators(seed: int) -> None:
    """Seed the generators of random, numpy and torch, or this thread's own one, with one 64-bit number."""
    if (own := OWN_GENERATOR.get()) is not None:
        own.manual_seed(seed)
        return
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace where there is no CUDA
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
