"""Evaluation: each sample once, and the same numbers on any number of processes."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import left, made
from tests.conftest import Runner
from tests.spied import spied

ROWS = 9


def with_known_losses(folder: Path, rows: int) -> Path:
    """Validation sample i has the label 0, and `tests.spies:Known` gives it the loss i."""
    made.shards(folder / "set", [6], label=lambda number: number % 2)
    return made.shards(
        folder / "set", [rows // 2, rows - rows // 2] if rows > 1 else [rows], "validation", label=lambda number: 0
    )


SETTINGS = ("model={name: 'tests.spies:Known'}", "steps=1", "evaluate.every=1")


@pytest.mark.parametrize("streaming", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_metrics_of_nine_samples_are_their_mean_on_any_number_of_processes(tmp_path: Path, streaming: str) -> None:
    for processes, size, lanes in [(1, 10, 2), (2, 10, 2), (3, 48, 3)]:  # micro-batches of 5, 5 and 16 samples
        train = Runner(tmp_path / f"{processes}-{size}")
        with_known_losses(train.folder, ROWS)
        settings = (*SETTINGS, f"batch.size={size}", f"batch.lanes={lanes}", f"data.streaming={streaming}")
        metrics = spied(train, made.config(train.folder), *settings, processes=processes).summary["metrics"]
        assert metrics["validation/loss"] == pytest.approx(4.0, abs=1e-6)  # the mean of 0..8
        assert metrics["validation/accuracy"] == 1 / 9  # only a loss of 0 is a right answer


@pytest.mark.parametrize(("rows", "processes"), [(1, 3), (3, 2), (16, 3)])
def test_sets_that_leave_a_process_without_a_sample_are_measured_too(train: Runner, rows: int, processes: int) -> None:
    with_known_losses(train.folder, rows)
    settings = (*SETTINGS, f"batch.size={4 * processes}", f"batch.lanes={processes}")
    metrics = spied(train, made.config(train.folder), *settings, processes=processes).summary["metrics"]
    assert metrics["validation/loss"] == pytest.approx((rows - 1) / 2, abs=1e-5)
    assert metrics["validation/accuracy"] == 1 / rows


def test_the_metrics_are_the_same_bits_on_any_number_of_processes_and_workers(tmp_path: Path) -> None:
    """With losses that are no round numbers, and averaged weights."""
    found = set()
    for processes, workers in [(1, 0), (2, 2)]:
        train = Runner(tmp_path / f"{processes}-{workers}")
        made.shards(train.folder / "set", [20])
        made.shards(train.folder / "set", [7, 16], "validation")
        settings = ("steps=4", "evaluate.every=2", "ema.decay=0.5", f"data.workers={workers}")
        run = spied(train, made.config(train.folder), *settings, processes=processes)
        losses = run.logged("validation/loss")
        assert [step for step, _ in losses] == [2, 4]
        assert losses[0][1] != losses[1][1]
        assert float.fromhex(losses[1][1]).hex() == float(run.summary["metrics"]["validation/loss"]).hex()
        found.add((tuple(losses), tuple(run.logged("validation/accuracy"))))
    assert len(found) == 1
    assert math.isfinite(float.fromhex(next(iter(found))[0][0][1]))


def test_evaluating_changes_nothing_in_the_training(tmp_path: Path) -> None:
    weights = set()
    for every in (0, 1):
        train = Runner(tmp_path / str(every))
        made.shards(train.folder / "set", [20])
        made.shards(train.folder / "set", [5], "validation")
        weights.add(spied(train, made.config(train.folder), "steps=4", f"evaluate.every={every}").weights)
    assert len(weights) == 1


def unlabelled(folder: Path, rows: int, good: int) -> Path:
    """Validation samples of which only the first `good` have a label."""
    made.shards(folder / "set", [12])
    return made.shards(folder / "set", [rows], "validation", label=lambda number: number % 3 if number < good else 7)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_sample_ends_the_run_with_the_training_so_far_saved(train: Runner, processes: int) -> None:
    unlabelled(train.folder, rows=7, good=6)
    settings = ("data.classes=3", "steps=3", "evaluate.every=3", "checkpoint.every=3")
    finished = train.run(made.config(train.folder), *settings, processes=processes)
    assert finished.code == 1 and finished.output.count("validation-00000-of-00001.parquet row 6: label 7") == 1, finished.output
    assert left.steps(train) == [3]
    again = train.run(made.config(train.folder), *settings, "data.on_error=stop", processes=processes)
    assert "step 3" in again.output and again.code == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_split_that_cannot_be_read_ends_the_run_with_the_training_so_far_saved(train: Runner, workers: int) -> None:
    made.shards(train.folder / "set", [12])
    [split] = made.shards(train.folder / "set", [16], "validation").glob("validation*")
    page = pq.ParquetFile(split).metadata.row_group(1).column(0).data_page_offset
    with split.open("r+b") as file:
        file.seek(page)
        file.write(bytes(32))
    settings = ("data.streaming=true", f"data.workers={workers}", "steps=3", "evaluate.every=3", "checkpoint.every=100")
    finished = train.run(made.config(train.folder), *settings)
    assert finished.code == 1 and "validation-00000-of-00001.parquet" in finished.output, finished.output
    assert left.steps(train) == [3]


def test_samples_that_are_left_out_are_no_part_of_the_mean_and_counted(train: Runner) -> None:
    unlabelled(train.folder, rows=7, good=5)
    settings = ("data.classes=3", "data.on_error=skip", "steps=2", "evaluate.every=2")
    run = spied(train, made.config(train.folder), *settings)
    assert run.summary["metrics"]["validation/skipped"] == 2
    assert run.summary["metrics"]["validation/accuracy"] in {right / 5 for right in range(6)}
    assert "validation after step 2: skipped validation-00000-of-00001.parquet row 6" in run.output


def test_a_split_without_any_readable_sample_is_no_perfect_score(train: Runner) -> None:
    unlabelled(train.folder, rows=7, good=0)
    settings = ("data.classes=3", "data.on_error=skip", "steps=2", "evaluate.every=2", "evaluate.metric=loss")
    finished = train.run(made.config(train.folder), *settings)
    assert finished.code == 1 and "none of the 7 validation samples can be read" in finished.output, finished.output
