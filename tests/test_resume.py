"""A run that is killed and started again ends as if it had never been: at any step, any number of times, on any processes."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests import made
from tests.conftest import Runner
from tests.parallel.test_launches import FSDP
from tests.spied import Spied, spied
from tests.test_invariance import EVERYTHING

LANES = 4
SIZES = (10, 3, 7)
TOTAL = sum(SIZES)  # in batches of 8 the first epoch ends within step 3, the second with step 5
STREAMING = {"stream": "data.streaming=true", "map": "data.streaming=false"}


def place(folder: Path, make: Callable[[Path, Sequence[int]], Path] = made.shards) -> tuple[Runner, str]:
    """Where a run of its own can be made, and its configuration."""
    train = Runner(folder)
    make(train.folder / "set", SIZES)
    return train, made.config(train.folder)


def killed(train: Runner, *settings: str, in_step: int, done: int, processes: int = 1) -> Spied:
    """A run that goes on after `done` steps, until one of its processes is ended by SIGKILL in the last lane of a step."""
    passes = (in_step - done) * LANES // processes
    return spied(train, *settings, processes=processes, kill=passes)


def assert_same(last: Spied, reference: Spied) -> None:
    """The last run of a chain leaves the numbers and weights of the uninterrupted one, to the last bit."""
    for key in ("train/loss", "train/lr", "train/grad_norm", "validation/loss", "validation/accuracy"):
        assert last.logged(key) == reference.logged(key), key
    assert last.weights == reference.weights
    for key in ("step", "samples", "metrics", "skipped"):
        assert last.summary[key] == reference.summary[key], key


@pytest.mark.slow
@pytest.mark.parametrize("streaming", ["stream", "map"])
def test_a_chain_of_kills_ends_as_the_run_that_was_never_killed(tmp_path: Path, streaming: str) -> None:
    """In the first step, within and at the ends of epochs, in one step twice; on 1, 2 and 4 processes."""
    settings = ("epochs=4", "schedule.name=cosine", "schedule.warmup=2", "checkpoint.every=1", STREAMING[streaming])
    train, config = place(tmp_path / "reference")
    reference = spied(train, config, *settings)
    assert len(reference.steps()) == 10
    train, config = place(tmp_path / "killed")
    runs, done = [], 0
    for step, processes, workers in [(1, 1, 0), (3, 2, 1), (6, 4, 0), (6, 1, 0)]:
        settings_now = (*settings, f"data.workers={workers}")
        runs.append(killed(train, config, *settings_now, in_step=step, done=done, processes=processes))
        done = step - 1
        assert sum(len(run.steps()) for run in runs) == done
    runs.append(spied(train, config, *settings, processes=2))
    assert [step for run in runs for step in run.steps()] == reference.steps()
    assert_same(runs[-1], reference)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", STREAMING)
def test_a_run_of_one_step_at_a_time_is_the_run_in_one_go(tmp_path: Path, streaming: str) -> None:
    settings = ("steps=30", "schedule.name=cosine", "checkpoint.every=1", "data.workers=2", STREAMING[streaming])
    train, config = place(tmp_path / "reference")
    reference = spied(train, config, *settings)
    train, config = place(tmp_path / "killed")
    runs = [killed(train, config, *settings, in_step=step + 1, done=step - 1) for step in range(1, 30)]
    assert [len(run.steps()) for run in runs] == [1] * 29  # and most of the next, in whose last lane it is killed
    runs.append(spied(train, config, *settings))
    assert [step for run in runs for step in run.steps()] == reference.steps()
    assert_same(runs[-1], reference)


def test_a_stream_of_unknown_length_goes_on_in_its_first_and_in_a_later_epoch(tmp_path: Path) -> None:
    """Its shards tell their sizes only by being read; what has been learned of them comes with the checkpoint."""
    settings = ("steps=10", "checkpoint.every=1", "data.classes=3", "data.shuffle_block=6")
    train, config = place(tmp_path / "reference", made.json_lines)
    reference = spied(train, config, *settings)
    train, config = place(tmp_path / "killed", made.json_lines)
    runs = [
        killed(train, config, *settings, in_step=2, done=0),
        killed(train, config, *settings, in_step=5, done=1, processes=2),
        killed(train, config, *settings, in_step=9, done=4),
        spied(train, config, *settings, processes=2),
    ]
    assert [step for run in runs for step in run.steps()] == reference.steps()
    assert_same(runs[-1], reference)
    assert "length: 10 steps, epochs of unknown length" in runs[0].output
    assert "length: 10 steps, 4 epochs of 20 samples" in runs[-1].output
    order = list(itertools.chain.from_iterable(reference.steps()))
    assert [sorted(order[start : start + TOTAL]) for start in (0, 20, 40, 60)] == [list(range(TOTAL))] * 4


def test_steps_since_the_last_checkpoint_are_made_again_and_told_once(tmp_path: Path) -> None:
    """Evaluations, checkpoints and logged steps come at the steps of the uninterrupted run, each once in metrics.jsonl."""
    settings = ("epochs=6", STREAMING["map"], "evaluate.every=4", "checkpoint.every=3", "checkpoint.keep=99")
    train, config = place(tmp_path / "reference")
    made.shards(train.folder / "set", [5], "validation")
    reference = spied(train, config, *settings)
    train, config = place(tmp_path / "killed")
    made.shards(train.folder / "set", [5], "validation")
    first = killed(
        train, config, *settings, in_step=9, done=0
    )  # steps 7 and 8 are done, but saved is step 6 (or 8, if that is the best)
    second = spied(train, config, *settings)
    saved = int(second.output.partition(", step ")[2].partition("\n")[0])
    assert saved in (6, 8)
    assert f"resuming: {first.folder}/checkpoints/step-{saved:08d}, step {saved}" in second.output
    assert first.steps() + second.steps()[8 - saved :] == reference.steps()
    assert second.steps() == reference.steps()[saved:]
    assert second.weights == reference.weights
    events = [[(line["step"], "validation/loss" in line) for line in run.metrics] for run in (second, reference)]
    assert events[0] == events[1]
    assert [step for step, evaluation in events[0] if evaluation] == [4, 8, 12, 15]
    assert [step for step, evaluation in events[0] if not evaluation] == list(range(1, 16))
    checkpoints = [sorted(path.name for path in (run.folder / "checkpoints").iterdir()) for run in (second, reference)]
    assert checkpoints[0] == checkpoints[1]


def test_a_run_killed_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    """Saved once an epoch; 2 steps of 10 samples are exactly one."""
    settings = ("epochs=3", STREAMING["map"], "batch.size=10", "batch.lanes=2", "checkpoint.every=1 epoch")
    train, config = place(tmp_path / "reference")
    reference = spied(train, config, *settings)
    train, config = place(tmp_path / "killed")
    runs = [spied(train, config, *settings, kill=5), spied(train, config, *settings, kill=5)]
    runs.append(spied(train, config, *settings))
    assert "nothing to do" not in runs[-1].output
    order = [step for run in runs for step in run.steps(lanes=2)]
    assert order == reference.steps(lanes=2)
    assert len(order) == 6
    assert runs[-1].weights == reference.weights


def test_a_finished_run_has_nothing_to_do_and_can_be_given_more(tmp_path: Path) -> None:
    train, config = place(tmp_path / "long")
    long = spied(train, config, "steps=10", "checkpoint.every=5")
    train, config = place(tmp_path / "short")
    short = spied(train, config, "steps=5", "checkpoint.every=5")
    files = {path: path.stat().st_mtime_ns for path in short.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for processes in (1, 2):
        again = spied(train, config, "steps=5", "checkpoint.every=5", processes=processes)
        assert f"nothing to do: {short.folder} finished at step 5" in again.output
        assert again.passes == []
    assert {path: path.stat().st_mtime_ns for path in files} == files
    more = spied(train, config, "steps=10", "checkpoint.every=5")
    assert more.folder == short.folder
    assert short.steps() + more.steps() == long.steps()
    assert_same(more, long)


def test_more_steps_are_refused_where_they_would_have_changed_those_already_made(tmp_path: Path) -> None:
    train, config = place(tmp_path)
    short = spied(train, config, "steps=5", "checkpoint.every=5", "schedule.name=linear")
    arguments = ("steps=10", "checkpoint.every=5", "schedule.name=linear", f"run.resume_from={short.folder}")
    refused = train.run(config, *arguments)
    assert refused.code == 2
    assert (
        "steps: 5 -> 10: refused, schedule linear would have given the steps already done another learning rate" in refused.output
    )


def test_moved_data_go_on_and_changed_data_are_refused(tmp_path: Path) -> None:
    train, config = place(tmp_path)
    assert train.run(config, "steps=2", "checkpoint.every=2").code == 0
    moved = train.folder / "elsewhere" / "set"
    moved.parent.mkdir()
    (train.folder / "set").rename(moved)
    finished = train.run(config, f"data.path={moved}", "steps=3", "checkpoint.every=2")
    assert finished.code == 0 and "resuming" in finished.output, finished.output
    made.shards(moved, (10, 3, 8))
    refused = train.run(config, f"data.path={moved}", "steps=4", "checkpoint.every=2")
    assert refused.code == 1 and "samples: 20 -> 21" in refused.output, refused.output


def test_lanes_chosen_by_the_number_of_processes_stay_on_a_resume(tmp_path: Path) -> None:
    """`batch.lanes: auto` is one lane a process, as many as the run was begun with."""
    settings = ("steps=4", "checkpoint.every=1", "batch.lanes=auto")
    train, config = place(tmp_path / "reference")
    reference = spied(train, config, *settings, processes=2)
    train, config = place(tmp_path / "killed")
    first = spied(train, config, *settings, processes=2, kill=3)
    second = spied(train, config, *settings)
    assert "2 lanes x 4, 2 lanes a process" in second.output
    assert first.steps(lanes=2) + second.steps(lanes=2) == reference.steps(lanes=2)
    assert second.weights == reference.weights


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to do it")
def test_the_workers_of_a_killed_run_end_with_it(train: Runner) -> None:
    """At once, and not when they next look: they hold copies of its sockets, which keep its other processes waiting."""
    made.shards(train.folder / "set", SIZES)
    running = train.start(made.config(train.folder), "steps=1000000", "data.workers=2")
    running.wait_for("step 1/")
    [trainer] = running.processes
    workers = [int(pid) for pid in Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    running.kill()
    deadline = time.monotonic() + 1
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers))


@pytest.mark.parametrize("streaming", ["true", pytest.param("false", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kills", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_time_on_any_machine_has_the_same_weights(tmp_path: Path, streaming: str, kills: int) -> None:
    """Everything on; SIGKILL comes in random lanes of random steps, and each start is on another machine, sharded or not."""
    dice = random.Random(f"{streaming} {kills}")
    settings = (
        *EVERYTHING[1:], "model.name=tests.spies:digits", f"epochs={3 if kills > 3 else 1}", "schedule.name=cosine",
        "checkpoint.every=4", "tracking.every=1", f"data.streaming={streaming}",
    )  # fmt: skip
    train = Runner(tmp_path / "reference")
    train.folder.mkdir()
    reference = spied(train, *settings, "data.workers=0")
    total = reference.summary["step"]
    train = Runner(tmp_path / "killed")
    train.folder.mkdir()
    saved = 0
    # As many kills in each of the epochs, and none twice in one step.
    for step in sorted(dice.choice(range(k * total // kills, (k + 1) * total // kills)) + 1 for k in range(kills)):
        processes = dice.choice((1, 2, 4)) if kills > 3 else 1 + (saved > 0)
        passes = ((step - 1 - saved) * LANES) // processes + dice.randint(1, LANES // processes)
        workers = f"data.workers={dice.choice((0, 1, 2))}"
        train.environment = dict(FSDP) if kills > 3 and processes > 1 and dice.random() < 0.5 else {}
        spied(train, *settings, workers, processes=processes, kill=passes)
        saved = (step - 1) // 4 * 4
    train.environment = {}
    last = spied(train, *settings, "data.workers=1", processes=2)
    assert_same(last, reference)
    assert [line["step"] for line in last.metrics if "train/loss" in line] == list(range(1, total + 1))


def test_a_finished_run_that_kept_no_checkpoint_or_lost_its_patience_has_nothing_to_do(tmp_path: Path) -> None:
    for settings in (
        ("steps=2", "checkpoint.every=0"),
        ("steps=90", "checkpoint.every=3", "evaluate.every=3", "evaluate.patience=2", "optimizer.lr=1e-30"),
    ):
        train, config = place(tmp_path / settings[0])
        made.shards(train.folder / "set", [5], "validation")
        first = spied(train, config, *settings)
        assert first.summary["step"] in (2, 9)
        again = spied(train, config, *settings)
        assert f"nothing to do: {first.folder} finished at step {first.summary['step']}" in again.output
        assert again.passes == []


def test_a_longer_run_ends_as_if_it_had_been_asked_for_at_once_also_by_patience(tmp_path: Path) -> None:
    """The evaluation that only a shorter length has brought does not count."""
    settings = ("checkpoint.every=2", "evaluate.every=4", "evaluate.patience=2", "optimizer.lr=1e-30")
    steps = []
    for lengths in ([40], [6, 40]):
        train, config = place(tmp_path / str(len(lengths)))
        made.shards(train.folder / "set", [5], "validation")
        for length in lengths:
            run = spied(train, config, *settings, f"steps={length}")
        steps.append(run.summary["step"])
    assert steps == [12, 12]


def test_allowed_changes_of_the_optimizer_are_in_force(tmp_path: Path) -> None:
    train, config = place(tmp_path)
    old = spied(train, config, "steps=2", "checkpoint.every=2")
    weights = set()
    for change in ("optimizer.momentum=0.9", "optimizer.momentum=0.1", "optimizer={name: AdamW, lr: 0.1}"):
        name = f"run.name=other{len(weights)}"
        go_on = ("steps=4", "checkpoint.every=2", f"run.resume_from={old.folder}", name, "run.allow_changes=[optimizer]")
        finished = train.run(config, change, *go_on)
        assert finished.code == 0, finished.output
        [folder] = train.outputs.glob(f"other{len(weights)}-*")
        weights.add(json.loads((folder / "summary.json").read_text())["weights_sha256"])
    assert len(weights) == 3


@pytest.mark.parametrize("change", ["order", "precision"])
def test_what_no_key_says_is_compared_too(tmp_path: Path, change: str) -> None:
    train, config = place(tmp_path)
    settings = ("checkpoint.every=2", "model={name: 'tests.spies_failure:Linear'}")
    assert train.run(config, "steps=2", *settings).code == 0
    if change == "order":  # the same names, sizes and number of samples
        first, *_, last = sorted((train.folder / "set").glob("train-*"))
        one, other = first.read_bytes(), last.read_bytes()
        first.write_bytes(other)
        last.write_bytes(one)
    else:
        train.environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    finished = train.run(config, "steps=4", *settings)
    assert finished.code == 1 and "the checkpoint was made otherwise" in finished.output, finished.output
    assert ("precision: no -> bf16" if change == "precision" else "beginnings and ends of the files") in finished.output
