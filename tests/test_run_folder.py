"""A run has one folder, held by one live run, whose newest checkpoint is what the same command goes on from."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import HANG_SECONDS, Launched, Runner
from tests.spied import spied
from tests.test_stopping import ACCELERATE_2, until
from train.checkpoint import damage

LINEAR = "model.name=tests.spies_failure:Linear"


def config(train: Runner) -> str:
    made.shards(train.folder / "set", [13, 11])
    return made.config(train.folder)


def done(train: Runner, *settings: str, processes: int = 1) -> str:
    """What a run says that must succeed."""
    finished = train.run(config(train), *settings, processes=processes)
    assert finished.code == 0, finished.output
    return finished.output


# --- which checkpoint ---


def test_the_newest_checkpoint_is_the_one_of_most_steps_also_after_a_resume(train: Runner) -> None:
    settings = (config(train), "steps=17", "checkpoint.every=1", "checkpoint.keep=2")
    lanes = 4
    spied(train, *settings, kill=8 * lanes + 1)  # killed in step 9
    assert left.steps(train) == [7, 8]
    spied(train, *settings, kill=4 * lanes + 1)  # in step 13, past the 10 that sorts before 9 as a name
    assert left.steps(train) == [11, 12]
    found = spied(train, *settings)
    assert "checkpoints/step-00000012, step 12" in found.output
    assert left.steps(train) == [16, 17]
    assert [step for step, _ in found.logged("train/loss")] == list(range(1, 18))


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_of_a_save_loses_at_most_that_save(tmp_path: Path, kills: int) -> None:
    settings = (LINEAR, "model.width=1900", "checkpoint.every=1", "checkpoint.keep=1")  # 29 MB a checkpoint
    train, undisturbed = Runner(tmp_path / "killed"), Runner(tmp_path / "undisturbed")
    step = 0
    for kill in range(kills):
        running = train.start(config(train), *settings, "steps=1000")
        while left.steps(train)[-1:] <= [step] or not list(train.outputs.glob("*/checkpoints/.step-*.tmp-*")):
            assert running.processes[0].is_alive(), running.output
        time.sleep(0.01 * (kill % 5))
        running.kill(signal.SIGKILL)
        running.processes[0].join()
        step = left.steps(train)[-1]
        assert damage(left.folder(train) / "checkpoints" / f"step-{step:08d}") is None
    assert f"step-{step:08d}, step {step}" in done(train, *settings, f"steps={step + 2}")
    assert not list(train.outputs.glob("*/checkpoints/.step-*"))
    done(undisturbed, *settings, f"steps={step + 2}", "checkpoint.every=0")
    assert left.weights(train) == left.weights(undisturbed)


def test_a_damaged_newest_checkpoint_is_passed_over_with_its_reason(train: Runner) -> None:
    settings = (LINEAR, "checkpoint.every=1")
    done(train, *settings, "steps=6")
    expected = left.weights(train)
    newest = left.folder(train) / "checkpoints" / "step-00000006" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    said = done(train, *settings, "steps=6")
    assert "checkpoint 6 is damaged (model.safetensors: 1 byte short); going back to step-00000005" in said
    assert left.weights(train) == expected
    assert left.logged(train) == [1, 2, 3, 4, 5, 6]


class Malicious:
    """Its unpickling makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_somebody_plants_in_a_checkpoint_is_not_run(train: Runner) -> None:
    settings = (LINEAR, "checkpoint.every=2")
    done(train, *settings, "steps=2")
    [checkpoint] = left.folder(train).glob("checkpoints/step-*")
    executed = train.folder / "executed"
    code = pickle.dumps(Malicious(executed))
    for name in ("random_states_0.pkl", "optimizer.pt", "optimizer.bin", "model.bin"):
        (checkpoint / name).write_bytes(code)
    assert "step-00000002, step 2" in done(train, *settings, "steps=4")
    (checkpoint / "model.safetensors").write_bytes(code)
    finished = train.run(config(train), *settings, "steps=6", "run.name=other", f"run.resume_from={checkpoint}")
    assert finished.code == 1 and "is damaged: model.safetensors" in finished.output
    assert not executed.exists()


# --- changed settings ---


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 steps."""
    train = Runner(tmp_path_factory.mktemp("old"))
    done(train, LINEAR, "steps=4", "checkpoint.every=4")
    return left.folder(train)


def test_every_change_that_makes_another_run_is_refused_with_its_reason_all_at_once(train: Runner, old: Path) -> None:
    changes = {
        "optimizer.lr: 0.1 -> 1.0": "the updates of the weights",
        "batch.size: 8 -> 16": "the saved position means another step",
        "batch.lanes: 4 -> 2": "the order in which gradients are added",
        "run.seed: 0 -> 5": "all random numbers",
        "model.width: None -> 8": "the saved ones would not fit",
        "data.shuffle: True -> False": "which samples are read, or their order",
        "data.path: ": "which samples are read, or their order",
    }
    settings = (
        "optimizer.lr=1",
        "batch.size=16",
        "batch.lanes=2",
        "run.seed=5",
        "model.width=8",
        "data.shuffle=false",
        f"data.path={train.folder}/other",
        "steps=9",
    )
    finished = train.run(config(train), LINEAR, *settings, f"run.resume_from={old}")
    assert finished.code == 2, finished.output
    refusals = [line for line in finished.output.splitlines() if ": refused, " in line]
    assert len(refusals) == len(changes)
    for change, reason in changes.items():
        assert any(line.startswith(change) and reason in line for line in refusals), (change, finished.output)
    assert left.steps(train) == []


def test_changes_beside_the_numbers_are_accepted_and_said(train: Runner, old: Path) -> None:
    data = f"data.path={old.parent.parent}/set"
    said = done(train, LINEAR, data, "steps=6", "tracking.every=2", "data.workers=1", f"run.resume_from={old}")
    assert "changed: steps: 4 -> 6 (allowed)" in said and "changed: tracking.every: 1 -> 2 (allowed)" in said
    assert left.summary(train)["step"] == 6


def test_a_change_can_be_insisted_on_and_is_in_the_new_runs_config(train: Runner, old: Path) -> None:
    settings = (f"data.path={old.parent.parent}/set", "steps=6", f"run.resume_from={old}")
    said = done(train, LINEAR, *settings, "optimizer.lr=1", "run.allow_changes=[optimizer.lr]")
    assert "changed: optimizer.lr: 0.1 -> 1.0 (allowed)" in said
    text = (left.folder(train) / "config.yaml").read_text()
    assert "allow_changes" in text and "optimizer.lr" in text
    assert {line["train/lr"] for line in left.lines(train)} == {1.0}
    finished = train.run(config(train), LINEAR, *settings, "run.name=wide", "model.width=8", "run.allow_changes=[model]")
    assert finished.code == 1 and "The weights do not fit the model Linear" in finished.output


# --- who holds the folder ---


def test_a_folder_in_use_by_a_live_run_is_refused_and_free_again_after_its_kill(train: Runner) -> None:
    train.environment["SPY_SECONDS"] = "0.05"
    first = train.start(config(train), LINEAR, "steps=500", "checkpoint.every=2")
    first.wait_for("step 3/")
    for processes in (1, 2):
        second = train.run(config(train), LINEAR, "steps=500", "checkpoint.every=2", processes=processes)
        assert second.code == 1
        assert second.output.count("error: ") == 1 and "is in use by another run that is alive" in second.output
    assert first.processes[0].is_alive(), first.output
    first.kill(signal.SIGKILL)
    first.processes[0].join()
    train.environment.clear()
    assert "resuming: " in done(train, LINEAR, "steps=500", "checkpoint.every=400")


def test_of_two_that_start_at_once_with_the_same_settings_one_runs(train: Runner) -> None:
    train.environment["SPY_SECONDS"] = "0.3"
    both = [train.start(config(train), LINEAR, "steps=6") for _ in range(2)]
    codes = sorted(running.end().code for running in both)
    assert codes == [0, 1]
    assert left.logged(train) == list(range(1, 7))


def test_a_process_that_comes_late_shares_the_folder_of_the_first(train: Runner) -> None:
    done(train, "model.name=tests.spies_failure:LateOnOne", "steps=3", "checkpoint.every=1", processes=2)
    assert left.steps(train) == [2, 3]


@pytest.mark.slow
def test_two_jobs_of_two_processes_run_side_by_side(train: Runner, launch: Callable[..., Launched]) -> None:
    command = (*ACCELERATE_2, "train/main.py", config(train), LINEAR, "steps=20", f"run.output_dir={train.outputs}")
    jobs = [launch(*command, f"run.name={name}", env={"SPY_SECONDS": "0.1"}) for name in ("one", "two")]
    for job in jobs:
        job.process.wait(HANG_SECONDS)
        assert job.process.returncode == 0, job.output
    facts = [json.loads(path.read_text()) for path in train.outputs.glob("*/summary.json")]
    assert len(facts) == 2 and len({fact["weights_sha256"] for fact in facts}) == 1


# --- threads ---


@pytest.mark.slow
def test_the_threads_that_the_environment_asks_for_do_not_change_the_bits(train: Runner, launch: Callable[..., Launched]) -> None:
    settings = (config(train), "model.name=tests.spies_failure:Averaging", "steps=5")
    launched = launch(
        "python", "train/main.py", *settings, f"run.output_dir={train.folder}/two",
        env={"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    )  # fmt: skip
    done(train, *settings)
    until(lambda: launched.process.poll() is not None, launched)
    assert launched.process.returncode == 0, launched.output
    [summary] = (train.folder / "two").glob("*/summary.json")
    assert json.loads(summary.read_text())["weights_sha256"] == left.weights(train)
