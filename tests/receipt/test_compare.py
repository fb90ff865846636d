"""What two receipts say of each other, shown on the shipped one and copies of it with other numbers."""

from __future__ import annotations

import copy

import pytest

from tests.conftest import ROOT
from train.receipt import document
from train.receipt.compare import Verdict, compare
from train.receipt.document import Receipt


@pytest.fixture
def then() -> Receipt:
    return document.read(ROOT / "receipts" / "digits.json")


def rounded(then: Receipt, change: float, *, kernels: str) -> Receipt:
    """A re-run whose last loss, a small one, parts by `change` of the largest."""
    now = copy.deepcopy(then)
    now["environments"][-1]["cpu"]["kernels"] = kernels
    now["trace"][-1][1] += change * max(loss for _, loss, _, _ in then["trace"])
    now["checkpoints"][-1]["weights_sha256"] = now["result"]["weights_sha256"] = "0" * 64
    return now


def test_noise_of_a_small_loss_is_judged_by_the_losses_of_the_run(then: Receipt) -> None:
    """0.016 -> 0.054 is more than thrice that loss, of a run that began at 2.1."""
    assert compare(then, rounded(then, 0.018, kernels="other")).verdict is Verdict.WITHIN_TOLERANCE
    assert compare(then, rounded(then, 0.022, kernels="other")).verdict is Verdict.DIFFERENT


def test_where_nothing_excuses_it_the_last_bit_is_a_difference(then: Receipt) -> None:
    same = then["environments"][-1]["cpu"]["kernels"]
    assert compare(then, rounded(then, 1e-12, kernels=same)).verdict is Verdict.DIFFERENT
    assert compare(then, rounded(then, 0.0, kernels=same)).verdict is Verdict.DIFFERENT, "the weights alone"
    assert compare(then, then).verdict is Verdict.IDENTICAL
