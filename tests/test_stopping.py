"""A signal at any moment ends a run with a checkpoint of the step it was at; the same command then goes on to the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import Launched, Runner

STOPPED = 75
MODEL = ("model.name=tests.spies_failure:Linear", "steps=12")
SLOW_DATA = (  # 0.1 s a sample
    *MODEL,
    "steps=3",
    "data.transforms.train=[{Resize: {size: 500}}, {GaussianBlur: {kernel_size: 31}}, {Resize: {size: 8}}]",
)


def config(train: Runner) -> str:
    """The settings of a small set with both splits."""
    made.shards(train.folder / "set", [13, 11])
    made.shards(train.folder / "set", [16], "validation")
    return made.config(train.folder)


def undisturbed(folder: Path, *settings: str) -> str:
    """The weights of a run that nobody stops."""
    train = Runner(folder)
    finished = train.run(config(train), *settings)
    assert finished.code == 0, finished.output
    return left.weights(train)


def went_on(train: Runner, *settings: str, processes: int = 1) -> str:
    """The weights after the same command was given again, on a model that does not wait any more."""
    train.environment.clear()
    finished = train.run(config(train), *settings, processes=processes)
    assert finished.code == 0, finished.output
    assert "resuming: " in finished.output
    return left.weights(train)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), *MODEL)


@pytest.mark.parametrize(
    "number, processes, told",
    [(signal.SIGTERM, 1, "all"), (signal.SIGINT, 2, "all"), (signal.SIGTERM, 2, "the last")],
)
def test_a_signal_to_one_or_all_saves_the_step_and_the_same_command_goes_on(
    train: Runner, expected: str, number: signal.Signals, processes: int, told: str
) -> None:
    train.environment["SPY_SECONDS"] = "0.05"
    running = train.start(config(train), *MODEL, processes=processes)
    running.wait_for("step 3/12")
    for process in running.processes[0 if told == "all" else -1 :]:
        os.kill(process.pid or 0, number)
    finished = running.end()
    assert finished.code == STOPPED, finished.output
    assert f"{number.name}: saving at the next step boundary" in finished.output
    assert "rror" not in finished.output
    assert left.summary(train)["status"] == "stopped"
    [step] = left.steps(train)
    assert 3 <= step < 12 and step == left.summary(train)["step"] == left.logged(train)[-1]
    assert went_on(train, *MODEL, processes=3 - processes) == expected
    assert left.logged(train) == list(range(1, 13))


@pytest.fixture(scope="module")
def expected_slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("slow"), *SLOW_DATA)


@pytest.mark.parametrize(
    "workers, moment",
    [(2, "length: "), (2, "step 1/3"), (0, "step 1/3")],
    ids=["first batch", "later", "no workers"],
)
def test_a_signal_to_the_whole_group_while_it_waits_for_data_takes_neither_workers_nor_samples(
    train: Runner, expected_slow: str, workers: int, moment: str
) -> None:
    running = train.start(config(train), *SLOW_DATA, f"data.workers={workers}")
    running.wait_for(moment)
    time.sleep(0.2)  # the main process waits for the workers now, or decodes itself
    os.killpg(running.processes[0].pid or 0, signal.SIGTERM)
    asked = time.monotonic()
    finished = running.end()
    assert finished.code == STOPPED, finished.output
    assert time.monotonic() - asked < 10
    assert left.steps(train) == [left.summary(train)["step"]]
    assert left.summary(train)["step"] in ((0,) if moment == "length: " else (1, 2))
    assert went_on(train, *SLOW_DATA) == expected_slow


def test_a_signal_during_an_evaluation_does_not_wait_for_its_end(train: Runner, expected: str) -> None:
    settings = (*MODEL, "evaluate.every=5", "data.workers=1")
    train.environment["SPY_EVALUATION_SECONDS"] = "1.5"  # a batch; there are 8
    running = train.start(config(train), *settings)
    running.wait_for("step 5/12")
    time.sleep(0.5)
    os.killpg(running.processes[0].pid or 0, signal.SIGTERM)
    asked = time.monotonic()
    finished = running.end()
    assert finished.code == STOPPED, finished.output
    assert time.monotonic() - asked < 8
    assert left.steps(train) == [5]
    assert "validation/accuracy" not in finished.output
    assert went_on(train, *settings) == expected
    evaluated = [line["step"] for line in left.lines(train) if "validation/accuracy" in line]
    assert evaluated == [5, 10, 12]


ACCELERATE = ("accelerate", "launch", "-q", "--num_processes", "1")
ACCELERATE_2 = ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
TORCHRUN_2 = ("torchrun", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    "launcher, number",
    [
        pytest.param(ACCELERATE, signal.SIGTERM, marks=pytest.mark.slow),
        (ACCELERATE_2, signal.SIGTERM),
        pytest.param(ACCELERATE, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(TORCHRUN_2, signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=["one process", "two processes", "interrupted", "torchrun interrupted"],
)
def test_a_signal_to_the_launcher_alone_ends_in_a_save_and_leaves_no_process(
    train: Runner, launch: Callable[..., Launched], expected: str, launcher: tuple[str, ...], number: signal.Signals
) -> None:
    outputs = f"run.output_dir={train.outputs}"
    launched = launch(*launcher, "train/main.py", config(train), *MODEL, outputs, env={"SPY_SECONDS": "0.5"})
    until(lambda: "step 3/12" in launched.output or launched.process.poll() is not None, launched)
    os.kill(launched.process.pid, number)
    launched.process.wait(60)
    assert launched.process.returncode != 0
    until(lambda: not group(launched.process.pid), launched)
    [step] = left.steps(train)
    assert 3 <= step < 12
    assert went_on(train, *MODEL) == expected


def until(done: Callable[[], bool], launched: Launched) -> None:
    deadline = time.monotonic() + 90
    while not done():
        assert time.monotonic() < deadline, launched.output
        time.sleep(0.05)


def group(leader: int) -> list[int]:
    """The live processes of the session that a launcher has begun."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_a_signal_while_the_run_is_prepared_ends_it_at_once(train: Runner) -> None:
    """Counting the rows of an epoch here; there is nothing to save yet."""
    (train.folder / "set").mkdir()
    line = json.dumps({"image": "no.png", "label": 0}) + "\n" + json.dumps({"image": "no.png", "label": 1}) + "\n"
    (train.folder / "set" / "train.jsonl").write_text(line * 1_000_000)
    running = train.start(made.config(train.folder), "epochs=1", "data.classes=2")
    running.wait_for("counting the records")
    began = time.monotonic()
    running.kill(signal.SIGTERM)
    finished = running.end()
    assert finished.code == 75 and "stopping before any step is made" in finished.output, finished.output
    assert time.monotonic() - began < 5
    assert left.steps(train) == []
