"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from train.config import Optimizer, Schedule
from train.optim import learning_rate


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
