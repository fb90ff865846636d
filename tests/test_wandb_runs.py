"""Weights & Biases beside a run: optional, one run across resumes, on one process, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import Runner
from tests.spied import spied

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def train(tmp_path: Path) -> Runner:
    """With a home folder that knows no key, and W&B's own mode not set, as compose passes on what is not set."""
    made.shards(tmp_path / "set", [13, 11])
    home = tmp_path / "home"
    home.mkdir()
    return Runner(tmp_path, {"HOME": str(home), "NETRC": str(home / "none"), "WANDB_MODE": "", "WANDB_API_KEY": ""})


def recorded(train: Runner) -> list[str]:
    """The ids of what W&B has recorded, one for each start."""
    return [path.name.rpartition("-")[2] for path in left.folder(train).glob("wandb/offline-run-*")]


def test_a_killed_run_goes_on_under_one_id_with_each_step_once_also_on_two_processes(train: Runner) -> None:
    settings = (made.config(train.folder), "steps=12", "checkpoint.every=5", "tracking.wandb=offline")
    spied(train, *settings, kill=7 * 4 + 1)  # in step 8, three after the checkpoint
    assert left.logged(train) == [1, 2, 3, 4, 5, 6, 7]
    spied(train, *settings, processes=2)
    assert left.logged(train) == list(range(1, 13))
    assert len(recorded(train)) == 2 and len(set(recorded(train))) == 1


def test_without_a_key_auto_trains_on_and_says_in_one_line_that_it_records_offline(train: Runner) -> None:
    finished = train.run(made.config(train.folder), "steps=2", "tracking.wandb=auto")
    assert finished.code == 0, finished.output
    assert finished.output.count("W&B records offline") == 1 and "WANDB_API_KEY" in finished.output
    assert len(recorded(train)) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_online_without_a_key_is_refused_before_anything_is_made(train: Runner, processes: int) -> None:
    finished = train.run(made.config(train.folder), "steps=2", "tracking.wandb=online", processes=processes)
    assert finished.code == 2, finished.output
    assert finished.output.count("error: ") == 1 and "there is no W&B key" in finished.output
    assert "Traceback" not in finished.output
    assert not train.outputs.exists()


def test_a_key_is_in_no_file_that_a_run_leaves(train: Runner) -> None:
    train.environment |= {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}
    finished = train.run(made.config(train.folder), "steps=2", "checkpoint.every=1", "tracking.wandb=auto")
    assert finished.code == 0, finished.output
    assert KEY not in finished.output
    files = [path for path in train.folder.rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
