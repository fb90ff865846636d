"""The GPT is GPT-2: its size, its initial weights, and that no place looks ahead."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from train.models.gpt import model


def test_the_defaults_have_the_parameters_of_gpt2() -> None:
    with torch.device("meta"):
        made = model(vocabulary=50257, context=1024)
    assert sum(parameter.numel() for parameter in made.parameters()) == 124_439_808


def test_a_place_sees_itself_and_what_is_before_it() -> None:
    torch.manual_seed(0)
    made = model(vocabulary=11, context=8, depth=2, width=16, heads=2).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    before, after = made(tokens), made(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert all(not torch.equal(before[:, place], after[:, place]) for place in (5, 6, 7))


def test_untrained_scores_are_nearly_even() -> None:
    torch.manual_seed(0)
    made = model(vocabulary=256, context=32, depth=4, width=128, heads=4)
    tokens = torch.randint(256, (8, 33))
    loss = functional.cross_entropy(made(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def test_what_is_added_to_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    made = model(vocabulary=256, context=32, depth=8, width=128, heads=4)
    weights = dict(made.named_parameters())
    for name, expected in {
        "tokens.weight": 0.02,
        "positions": 0.01,
        "blocks.3.attention.query.weight": 0.02,
        "blocks.3.widened.weight": 0.02,
        "blocks.3.attention.joined.weight": 0.02 / 4,  # the square root of two of each of 8 blocks
        "blocks.3.narrowed.weight": 0.02 / 4,
    }.items():
        assert weights[name].std().item() == pytest.approx(expected, rel=0.05), name
    assert made.head.weight is made.tokens.weight
