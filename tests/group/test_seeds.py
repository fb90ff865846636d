"""Several seeds in one process: each run has the bits, the folder and the checkpoints that it has when it is trained alone."""

from __future__ import annotations

import json
import math
import os
import signal
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import left, made
from tests.conftest import Runner
from tests.tasks import texts
from train import courses
from train.errors import RunError
from train.group import beside
from train.group.summary import spreads

SETTINGS = ("steps=9", "ema.decay=0.9", "checkpoint.every=2", "evaluate.every=3")
SEEDS = (0, 1, 7)
TOGETHER = "seeds=[0,1,7]"
CORES = len(os.sched_getaffinity(0))
needs_cores = pytest.mark.skipif(CORES < 2, reason="with one core the runs take turns")


def config(train: Runner) -> str:
    made.shards(train.folder / "set", [13, 11])
    made.shards(train.folder / "set", [16], "validation")
    return made.config(train.folder)


def alone(train: Runner, *settings: str, seeds: tuple[int, ...] = SEEDS) -> dict[str, str]:
    """The weights of each seed's own run, by the name of its folder."""
    for seed in seeds:
        finished = train.run(config(train), *settings, f"run.seed={seed}")
        assert finished.code == 0, finished.output
    return weights(train)


def weights(train: Runner) -> dict[str, str]:
    return {path.parent.name: left.facts(path.parent)["weights_sha256"] for path in train.outputs.glob("*/summary.json")}


def found(train: Runner) -> dict[str, Any]:
    """seeds.json."""
    [path] = train.outputs.glob("*/seeds.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return alone(Runner(tmp_path_factory.mktemp("alone")), *SETTINGS)


def test_each_seed_has_the_bits_of_its_own_run_with_norm_dropout_and_averaged_weights(
    train: Runner, expected: dict[str, str]
) -> None:
    finished = train.run(config(train), *SETTINGS, TOGETHER, "data.workers=4")
    assert finished.code == 0, finished.output
    assert "1 data worker a process" in finished.output  # of the four, shared out
    if CORES > 1:
        assert f"seeds: 0, 1, 7, {min(CORES, 3)} at a time, in threads" in finished.output
    assert len(set(expected.values())) == 3
    assert weights(train) == expected
    result = found(train)
    assert [(one["seed"], one["step"]) for one in result["seeds"]] == [(seed, 9) for seed in SEEDS]
    assert {Path(one["folder"]).name: one["weights_sha256"] for one in result["seeds"]} == expected
    losses = [one["metrics"]["validation/loss"] for one in result["seeds"]]
    assert result["metrics"]["validation/loss"]["mean"] == pytest.approx(sum(losses) / 3)
    assert result["metrics"]["validation/loss"]["max"] == max(losses)
    told = [line for line in finished.output.splitlines() if line.startswith("step ") and "±" in line]
    assert [line.split()[1] for line in told] == [f"{step}/9" for step in range(1, 10)]
    loss = result["metrics"]["train/loss"]
    assert f"loss {loss['mean']:.4f}  ± {loss['std']:.4f}" in told[-1]
    [plot] = train.outputs.glob("*/seeds.svg")
    assert all(f"seed {seed}<" in plot.read_text() for seed in SEEDS) and ">validation/accuracy<" in plot.read_text()
    again = train.run(config(train), *SETTINGS, TOGETHER)
    assert again.code == 0 and again.output.count("nothing to do") == 3, again.output
    single = train.run(config(train), *SETTINGS, "run.seed=7")
    assert "nothing to do" in single.output


def test_runs_that_are_at_different_steps_and_killed_end_with_the_same_bits(train: Runner, expected: dict[str, str]) -> None:
    stopped = train.run(config(train), *SETTINGS, "run.seed=1", "--stop-at", "3")
    assert stopped.code == 75, stopped.output
    train.environment["SPY_KILL"] = "22"  # a run's pass: in its sixth step of this start
    killed = train.run(config(train), *SETTINGS, TOGETHER)
    assert killed.code == -signal.SIGKILL, killed.output
    assert "seed 1: resuming: " in killed.output
    train.environment.clear()
    finished = train.run(config(train), *SETTINGS, TOGETHER)
    assert finished.code == 0, finished.output
    assert finished.output.count("resuming: ") == 3
    assert weights(train) == expected


def test_a_signal_saves_all_and_the_same_command_goes_on(train: Runner) -> None:
    settings = ("model.name=tests.spies_failure:Linear", "steps=12", TOGETHER)
    train.environment["SPY_SECONDS"] = "0.05"
    running = train.start(config(train), *settings)
    running.wait_for("step 3/12")
    running.kill(signal.SIGTERM)
    stopped = running.end()
    assert stopped.code == 75, stopped.output
    assert "SIGTERM: saving at the next step boundary" in stopped.output
    assert len(left.steps(train)) == 3 and all(3 <= step < 12 for step in left.steps(train))
    train.environment.clear()
    finished = train.run(config(train), *settings)
    assert finished.code == 0 and finished.output.count("resuming: ") == 3, finished.output
    assert [one["step"] for one in found(train)["seeds"]] == [12, 12, 12]


@needs_cores
def test_attention_is_computed_in_threads(tmp_path: Path) -> None:
    """Its kernel is one of those that may draw random numbers, and draws none."""
    settings = ("steps=3", "model.dropout=0")
    one, many = (Runner(made_folder(tmp_path / name)) for name in ("alone", "together"))
    for train in (one, many):
        texts.file(train.folder)
    for seed in (0, 1):
        assert one.run(texts.config(one.folder), *settings, f"run.seed={seed}").code == 0
    finished = many.run(texts.config(many.folder), *settings, "seeds=[0,1]")
    assert "seeds: 0, 1, 2 at a time, in threads" in finished.output, finished.output
    assert weights(many) == weights(one)


def test_no_worker_is_forked_beside_threads(train: Runner) -> None:
    """What another thread holds locked in a fork stays locked in the worker."""
    train.environment["SPY_FORKS"] = str(train.folder / "forks")
    settings = ("model={name: tests.group.nets:NotesForks}", "steps=3", "evaluate.every=2", "data.workers=2")
    finished = train.run(config(train), *settings, "seeds=[0,1]")
    assert finished.code == 0, finished.output
    forks = (train.folder / "forks").read_text().splitlines()
    assert len(forks) >= 4 and not [threads for threads in forks if "readahead" in threads or "seed" in threads]


def test_a_thread_keeps_its_number_of_cpu_threads_whatever_others_set() -> None:
    before = torch.get_num_threads()
    with beside._pool(1, before + 1) as pool:
        pool.submit(int).result()
        torch.set_num_threads(before)
        assert pool.submit(torch.get_num_threads).result() == before + 1


@needs_cores
@pytest.mark.parametrize(
    "setting, reason",
    [
        ("model={name: tests.group.nets:DrawsFromNumpy}", "draws random numbers by a generator of the process"),
        ("model={name: tests.group.nets:DrawsSeldom}", "draws random numbers by a generator of the process"),
        ("model={name: tests.group.nets:DrawsWithoutGenerator}", "draws random numbers by aten.rand.default"),
        ("speed.recompute=[dropout]", "speed.recompute puts back the generator"),
        ("speed.precision=bf16", "autocast keeps the casts of weights for all threads"),
        pytest.param("run.threads=1024", "the cores that there are do not suffice", marks=pytest.mark.slow),
    ],
)
def test_where_threads_would_change_the_bits_the_runs_take_turns(tmp_path: Path, setting: str, reason: str) -> None:
    expected = alone(Runner(made_folder(tmp_path / "alone")), "steps=3", setting, seeds=(0, 1))
    train = Runner(made_folder(tmp_path / "together"))
    finished = train.run(config(train), "steps=3", setting, "seeds=[0,1]")
    assert finished.code == 0, finished.output
    assert "seeds: 0, 1, one after the other, step by step: " in finished.output and reason in finished.output
    assert weights(train) == expected


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_what_fails_in_one_run_is_told_with_its_seed_and_the_others_go_on(train: Runner) -> None:
    """Sample 5 is in the only step of some seeds and not of others."""
    settings = ("model={name: tests.spies_failure:Infinite, bad: 5}", "steps=1", "seeds=[0,1,2,3,4,5]")
    finished = train.run(config(train), *settings)
    assert finished.code == 1
    errors = finished.output.rpartition("error: ")[2]
    failed = [seed for seed in range(6) if f"seed {seed}: step 1: the gradient's norm is" in errors]
    assert 0 < len(failed) < 6, finished.output
    assert len(weights(train)) == 6 - len(failed)
    assert not list(train.outputs.glob("*/seeds.json"))


def test_nothing_goes_on_where_all_fail(train: Runner) -> None:
    finished = train.run(config(train), "model={name: tests.spies_failure:Infinite, bad: 5}", "steps=3", "seeds=[0,1]")
    assert finished.code == 1
    errors = finished.output.rpartition("error: ")[2]
    assert all(f"seed {seed}: step " in errors for seed in (0, 1)) and "went on" not in errors


def test_what_a_failed_step_held_is_free_for_the_others() -> None:
    activation = weakref.ref(torch.empty(0))

    def fail() -> None:
        nonlocal activation
        held = torch.empty(1)
        activation = weakref.ref(held)
        raise MemoryError

    def failing() -> courses.Course[str]:
        try:
            yield fail
        except MemoryError as error:
            raise RunError("out of memory") from error
        return "finished"

    def other() -> courses.Course[str]:
        yield int
        return "finished" if activation() is None else "short of memory"

    ends = courses.conduct({0: failing(), 1: other()}, courses.done, lambda seed: nullcontext())
    assert str(ends[0]) == "out of memory" and ends[1] == "finished"


@pytest.mark.parametrize(
    "settings, processes, reason",
    [
        (["seeds=[1,2,1]"], 1, "seeds: names 1 twice"),
        (["seeds=[3]"], 1, "has one seed, for which there is run.seed: 3"),
        (["seeds=[1,2]", "run.seed=4"], 1, "run.seed: seeds gives those of the runs"),
        (["seeds=[1,-2]"], 1, "seeds.1: must be at least 0, not '-2'"),
        (["seeds=[1,2]"], 2, "several seeds are trained by one process on one device, and the mode is ddp"),
        (["seeds=[1,2]", "tracking.wandb=offline"], 1, "W&B follows one run in a process"),
        (["seeds=[1,2]", "--profile", "3..4"], 1, "give run.seed in place of seeds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    train: Runner, settings: list[str], processes: int, reason: str
) -> None:
    refused = train.run(config(train), "steps=5", *settings, processes=processes)
    assert refused.code == 2, refused.output
    assert reason in refused.output
    assert not train.outputs.exists()


def test_the_configuration_that_a_group_leaves_is_its_own(train: Runner) -> None:
    settings = ("steps=1", "seeds=[0,1]")
    assert train.run(config(train), *settings).code == 0
    [path] = [path.parent for path in train.outputs.glob("*/seeds.json")]
    again = train.run(str(path / "config.yaml"))
    assert again.code == 0 and again.output.count("nothing to do") == 2, again.output


def test_the_spread_is_the_sample_standard_deviation() -> None:
    metrics = [{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 5.0}, {"a": 4.0, "b": 5.0, "skipped": 1.0}]
    assert spreads(metrics) == {
        "a": {"mean": pytest.approx(7 / 3), "std": pytest.approx((7 / 3) ** 0.5), "min": 1.0, "max": 4.0},
        "b": {"mean": 5.0, "std": 0.0, "min": 5.0, "max": 5.0},
    }


def test_values_that_are_not_finite_have_no_deviation() -> None:
    """A perplexity may be infinite, and under fp16 the loss of a step that is left out."""
    infinite = spreads([{"a": 1.0}, {"a": math.inf}])["a"]
    assert infinite == {"mean": math.inf, "std": pytest.approx(math.nan, nan_ok=True), "min": 1.0, "max": math.inf}
