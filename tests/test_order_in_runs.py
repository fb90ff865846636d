"""Which samples a run trains on, and what they look like: the same on any number of processes and workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests import made
from tests.conftest import Runner
from tests.spied import Spied, spied

SHARDS = (10, 3, 7)
TOTAL = sum(SHARDS)
# Processes, and workers of each: also more workers than shards.
MACHINES = {"stream": [(1, 0), (1, 4), (2, 1), (4, 2)], "map": [(1, 0), (2, 1)]}
STREAMING = {"stream": "data.streaming=true", "map": "data.streaming=false"}


@pytest.fixture(scope="module", params=["stream", "map"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Spied]:
    """The same two epochs of 20 samples in batches of 8 on several machines."""
    found = {}
    for processes, workers in MACHINES[request.param]:
        folder = tmp_path_factory.mktemp(f"{request.param}-{processes}-{workers}")
        made.shards(folder / "set", SHARDS)
        settings = ("epochs=2", "schedule.name=linear", "schedule.warmup=1", f"data.workers={workers}", STREAMING[request.param])
        found[processes, workers] = spied(
            Runner(folder), made.config(folder), *settings, "data.shuffle_block=6", processes=processes
        )
    return found


def test_a_step_has_the_same_samples_on_any_number_of_processes_and_workers(runs: dict[tuple[int, int], Spied]) -> None:
    steps = {machine: run.steps() for machine, run in runs.items()}
    assert all(found == steps[1, 0] for found in steps.values()), steps


def test_an_epoch_has_each_sample_once_in_full_batches_and_in_an_order_of_its_own(runs: dict[tuple[int, int], Spied]) -> None:
    for run in runs.values():
        assert [len(step) for step in run.steps()] == [8] * 5
        order = list(itertools.chain.from_iterable(run.steps()))
        assert [sorted(order[:TOTAL]), sorted(order[TOTAL:])] == [list(range(TOTAL))] * 2
        assert len({tuple(order[:TOTAL]), tuple(order[TOTAL:]), tuple(range(TOTAL))}) == 3


def test_losses_rates_and_weights_are_the_same_bits(runs: dict[tuple[int, int], Spied]) -> None:
    for key in ("train/loss", "train/lr", "train/grad_norm"):
        logged = {machine: run.logged(key) for machine, run in runs.items()}
        assert [step for step, _ in logged[1, 0]] == [1, 2, 3, 4, 5]
        assert all(found == logged[1, 0] for found in logged.values()), (key, logged)
    assert len({run.weights for run in runs.values()}) == 1


def test_the_learning_rate_is_stepped_once_a_step_and_ends_where_the_schedule_ends(runs: dict[tuple[int, int], Spied]) -> None:
    for run in runs.values():
        rates = [float.fromhex(rate) for _, rate in run.logged("train/lr")]
        # One step of warmup at half of 0.1, and a line from 0.1 to 0 over the other four.
        assert rates == pytest.approx([0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3, 0.0], abs=1e-15)


@pytest.mark.parametrize("streaming", STREAMING)
@pytest.mark.parametrize(("rows", "processes"), [(1, 2), (5, 2)])
def test_fewer_samples_than_a_batch_or_than_processes_are_trained_on_equally_often(
    train: Runner, streaming: str, rows: int, processes: int
) -> None:
    made.shards(train.folder / "set", [1] * rows)
    settings = ("epochs=8", "data.classes=3", STREAMING[streaming])
    run = spied(train, made.config(train.folder), *settings, processes=processes)
    order = list(itertools.chain.from_iterable(run.steps()))
    assert [len(step) for step in run.steps()] == [8] * rows
    for epoch in range(8):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


AUGMENTED = (
    "data.transforms.train=[{RandomCrop: {size: 8, padding: 2}}, RandomHorizontalFlip, "
    "{RandomErasing: {p: 0.5, scale: [0.1, 0.2]}}, tests.spies:Draws]"
)


def by_sample(runs: list[Spied], field: str) -> dict[tuple[int, int], Any]:
    """A field by sample and epoch, over runs that go on from one another."""
    ids = [number for run in runs for step in run.steps() for number in step]
    values = [value for run in runs for step in run.steps(field) for value in step]
    return {(number, place // TOTAL): value for place, (number, value) in enumerate(zip(ids, values, strict=True))}


def test_augmented_pixels_are_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    """So they are the same on any number of processes and workers, after a kill, and for a fork's own transform."""

    def augmented(name: str, *settings: str, processes: int = 1, kill: int = 0) -> list[Spied]:
        train = Runner(tmp_path / name)
        made.shards(train.folder / "set", SHARDS)
        settings = (made.config(train.folder), "epochs=2", AUGMENTED, *settings)
        if not kill:
            return [spied(train, *settings, processes=processes)]
        first = spied(train, *settings, processes=processes, kill=kill)
        return [first, spied(train, *settings, processes=processes)]

    plain = augmented("plain")
    seen = by_sample(plain, "pixels")
    assert len(seen) == 2 * TOTAL == len(set(seen.values()))  # no two look alike: epochs differ too
    assert by_sample(augmented("workers", "data.workers=2"), "pixels") == seen
    assert by_sample(augmented("processes", "data.workers=2", processes=2), "pixels") == seen
    # Killed in the third step (4 passes a step), after a checkpoint at every step.
    killed = augmented("killed", "data.workers=2", "checkpoint.every=1", kill=10)
    assert [len(run.steps()) for run in killed] == [2, 3]
    assert by_sample(killed, "pixels") == seen
    assert not set(by_sample(augmented("seed", "run.seed=1"), "pixels").values()) & set(seen.values())
    drawn = by_sample(plain, "drawn")
    for place, generator in enumerate(("random", "numpy", "a generator seeded by torch.initial_seed()", "torch")):
        values = [value[place] for value in drawn.values()]
        assert len(set(values)) > 25, generator  # 37 of 256 values are expected in 40 draws
