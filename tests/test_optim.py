"""Optimizers by name with their arguments, and the learning rate as a function of the step."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from train.config import Optimizer, Schedule
from train.optim import check_optimizer, learning_rate


def rates(name: str, steps: int = 10, warmup: int = 0, lr: float = 2.0, **arguments: Any) -> list[float]:
    schedule = Schedule(name=name, **arguments)
    return [learning_rate(Optimizer(lr=lr), schedule, step, warmup=warmup, total=steps) for step in range(steps)]


def test_a_constant_schedule_is_constant() -> None:
    assert rates("constant") == [2.0] * 10


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_goes_from_the_learning_rate_to_its_final_value_at_the_last_step(name: str, warmup: int) -> None:
    found = rates(name, warmup=warmup, final=0.25)
    assert found[warmup] == 2.0 == max(found)
    assert found[-1] == pytest.approx(0.5, abs=1e-15)
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert rates(name)[-1] == pytest.approx(0.0, abs=1e-15)


def test_a_linear_schedule_falls_by_the_same_amount_each_step() -> None:
    assert rates("linear", steps=5) == [2.0, 1.5, 1.0, 0.5, 0.0]


def test_a_cosine_schedule_is_half_way_in_the_middle() -> None:
    assert rates("cosine", steps=5) == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0])


def test_warmup_rises_evenly_from_above_zero_and_never_reaches_beyond_the_learning_rate() -> None:
    assert rates("constant", warmup=3) == [0.5, 1.0, 1.5] + [2.0] * 7


def test_steps_divide_the_rate_at_each_interval() -> None:
    assert rates("step", every=4, gamma=0.5) == [2.0] * 4 + [1.0] * 4 + [0.5] * 2


def test_one_cycle_rises_to_the_learning_rate_and_falls_to_nearly_nothing() -> None:
    found = rates("one_cycle", steps=101, rise=0.3, initial=0.04, final=4e-6)
    assert found[0] == pytest.approx(0.08)
    assert found.index(max(found)) == 30
    assert max(found) == pytest.approx(2.0)
    assert found[-1] == pytest.approx(8e-6)
    assert found[:31] == sorted(found[:31])
    assert found[30:] == sorted(found[30:], reverse=True)


@pytest.mark.parametrize("name", ["linear", "cosine", "one_cycle"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_a_rate_too(name: str, steps: int) -> None:
    for warmup in range(steps + 2):
        found = rates(name, steps=steps, warmup=warmup)
        assert all(0 <= rate <= 2.0 for rate in found), (warmup, found)


def problems(name: str, **arguments: Any) -> list[str]:
    return [f"{key}: {message}" for key, message in check_optimizer({"name": name, "lr": 0.1, "clip_norm": None, **arguments})]


@pytest.mark.parametrize("value", [True, False, None])
def test_fused_and_foreach_may_be_on_off_or_left_to_torch(value: bool | None) -> None:
    assert not problems("AdamW", fused=value)
    assert not problems("AdamW", foreach=value)


@pytest.mark.parametrize("value", ["maybe", 1, 0.0, [True]])
def test_a_switch_of_an_optimizer_takes_nothing_but_on_and_off(value: Any) -> None:
    assert problems("AdamW", fused=value) == [f"fused: must be true or false or empty, not {value!r}"]
    assert problems("SGD", nesterov=value, momentum=0.9) == [f"nesterov: must be true or false, not {value!r}"]
    [problem] = problems("torchao/AdamW8bit", amsgrad=value)  # which has no annotations
    assert problem.startswith("amsgrad: must be true or false")


def test_optimizers_of_torchao_are_found_by_name() -> None:
    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"):
        assert not problems(f"torchao/{name}", betas=[0.8, 0.9], weight_decay=0.1)
    [problem] = problems("torchao/AdamW8bits")
    assert "did you mean torchao/AdamW8bit?" in problem
    [problem] = problems("AdamW8bit")
    assert "also those of torchao.optim, such as torchao/AdamW8bit" in problem
    for name in ("torchao/CPUOffloadOptimizer", "torchao/_AdamW", "torchao/Optimizer"):
        assert "there is no optimizer" in problems(name)[0]


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("block_size", 0, "refuses its arguments"),
        ("block_size", "large", "refuses its arguments"),
        ("weight_decay", "much", "refuses its arguments"),
        ("betas", [0.9, 1.5], "Invalid beta"),
        ("amsgrad", True, "cannot take the largest of quantised states"),
        ("bf16_stochastic_round", True, "others in each process"),
        ("fused", True, "fused: unknown key"),
    ],
)
def test_what_an_optimizer_of_torchao_cannot_do_is_refused_before_a_run(argument: str, value: Any, words: str) -> None:
    [problem] = problems("torchao/AdamW8bit", **{argument: value})
    assert words in problem


def test_a_missing_torchao_is_told_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert problems("torchao/AdamW8bit") == ["name: torchao/AdamW8bit needs torchao: pip install 'lockstep[torchao]'"]
