"""When one process, one sample or the disk goes wrong, the run ends in seconds and says the first cause, near the end."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import Finished, Launched, Runner, Running
from tests.parallel.test_launches import FSDP
from tests.test_stopping import TORCHRUN_2, until

LINEAR = "model.name=tests.spies_failure:Linear"
SECONDS = 15  # within which a failure must have ended the run


def config(train: Runner, sizes: tuple[int, ...] = (13, 11)) -> str:
    made.shards(train.folder / "set", sizes)
    return made.config(train.folder)


def last_lines(finished: Finished, count: int = 20) -> str:
    return "\n".join(finished.output.splitlines()[-count:])


def ended(running: Running) -> Finished:
    """The run, which has failed just now, at its end; it has not been waiting for anything."""
    began = time.monotonic()
    finished = running.end()
    assert time.monotonic() - began < SECONDS, finished.output
    assert "Traceback" not in finished.output
    assert finished.code == 1, finished.output
    return finished


# --- numbers that are not finite ---


@pytest.mark.parametrize("processes", [1, 2])
def test_a_sample_that_makes_the_loss_infinite_stops_all_before_the_update_and_is_named(train: Runner, processes: int) -> None:
    # Unshuffled, step 3 has the samples 16 to 23; with two processes of two lanes the second one alone has 21, in lane 2.
    settings = ("data.shuffle=false", "steps=6", "checkpoint.every=1", "model.name=tests.spies_failure:Infinite", "model.bad=21")
    finished = ended(train.start(config(train, (13, 19)), *settings, processes=processes))
    told = last_lines(finished)
    assert "step 3: the gradient's norm is nan" in told
    assert "lane 2: loss" in told and "train-00001-of-00002.parquet row 7, train-00001-of-00002.parquet row 8" in told
    assert "lane 3" not in told
    assert told.count("error: ") == 1
    assert left.steps(train)[-1] == 2
    assert left.logged(train) == [1, 2]
    assert not (left.folder(train) / "model").exists()


def test_a_learning_rate_that_makes_the_weights_explode_never_reaches_a_checkpoint(train: Runner) -> None:
    finished = ended(train.start(config(train), LINEAR, "model.width=16", "steps=9", "checkpoint.every=1", "optimizer.lr=1e30"))
    assert "lower optimizer.lr" in last_lines(finished)
    from train.weights import load_tensors

    for path in left.folder(train).glob("checkpoints/step-*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_tensors(path).values()), path
    assert left.steps(train)[-1] == left.logged(train)[-1]


# --- one process of two ---


def test_a_bad_sample_of_the_second_process_ends_both_and_is_named(train: Runner) -> None:
    settings = config(train, (8,))
    row = made.json_lines(train.folder / "lines", [16]) / "pictures" / "13.png"
    row.write_bytes(made.png(13)[:60])
    finished = ended(
        train.start(settings, LINEAR, "steps=9", f"data.path={train.folder}/lines", "data.shuffle=false", processes=2)
    )
    assert "[process 1] error: train-00000-of-00001.jsonl row 13: cannot be decoded" in last_lines(finished)
    assert finished.output.splitlines()[-1].startswith("[process 0] error: another process has ended")


def test_a_killed_process_takes_the_other_with_it(train: Runner) -> None:
    train.environment["SPY_SECONDS"] = "0.05"
    running = train.start(config(train), LINEAR, "steps=500", processes=2)
    running.wait_for("step 3/")
    os.kill(running.processes[1].pid or 0, signal.SIGKILL)
    finished = running.end()
    assert finished.code == 1
    assert "saving at the next step" not in finished.output
    assert finished.output.splitlines()[-1].startswith("[process 0] error: another process has ended")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_data_worker_is_told_with_what_it_mostly_means(train: Runner, processes: int) -> None:
    train.environment["SPY_SECONDS"] = "0.05"
    running = train.start(config(train), LINEAR, "steps=500", "data.workers=1", processes=processes)
    running.wait_for("step 3/")
    [worker] = children(running.processes[-1].pid or 0)
    os.kill(worker, signal.SIGKILL)
    told = last_lines(ended(running))
    assert f"error: data worker {worker} has died (Killed)" in told or "error: a data worker has died" in told
    assert "too little memory" in told and "--memory" in told and "data.workers" in told


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_an_output_folder_that_cannot_be_written_ends_both_processes_with_one_message(train: Runner) -> None:
    (train.folder / "outputs").write_text("a file, not a folder")
    finished = ended(train.start(config(train), LINEAR, "steps=3", processes=2))
    assert last_lines(finished).count("error: ") == 1
    assert f"{train.outputs}/run-" in last_lines(finished) and "give another run.output_dir" in last_lines(finished)


def test_a_mistake_in_a_model_is_told_by_its_name_and_with_debug_by_its_place(train: Runner) -> None:
    settings = (config(train), "steps=9", "data.shuffle=false", "model.name=tests.spies_failure:Refusing", "model.bad=5")
    finished = ended(train.start(*settings, processes=2))
    assert "[process 1] error: KeyError: 'a mistake in the model'" in last_lines(finished)
    debugged = train.run(*settings, "--debug")
    assert debugged.code == 1
    assert 'raise KeyError("a mistake in the model")' in debugged.output


@pytest.mark.slow
def test_the_launchers_last_words_are_the_cause(train: Runner, launch: Callable[..., Launched]) -> None:
    settings = (config(train), "steps=9", "data.shuffle=false", "model.name=tests.spies_failure:Infinite", "model.bad=21")
    launched = launch(*TORCHRUN_2, "train/main.py", *settings, f"run.output_dir={train.outputs}")
    until(lambda: launched.process.poll() is not None, launched)
    assert launched.process.returncode == 1
    root_cause = launched.output.rpartition("Root Cause")[2]
    assert "step 3: the gradient's norm is nan" in root_cause
    assert "train-00001-of-00002.parquet row 8" in root_cause


# --- memory ---


def hungry(train: Runner, gib: float = 0.7, **arguments: object) -> tuple[str, str]:
    """A configuration at micro-batches of 4 samples, of which each asks for 0.7 GiB in a process that may have 2 GiB more."""
    options = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return config(train), f"model={{name: 'tests.spies_failure:Hungry', gib: {gib}, room: 2, {options}}}"


def test_a_step_too_large_for_the_memory_says_what_was_held_and_a_number_of_lanes_that_fits(train: Runner) -> None:
    settings = (*hungry(train), "steps=3", "batch.lanes=2")
    finished = ended(train.start(*settings))
    told = last_lines(finished)
    assert "error: out of memory in step 1: 2.80 GiB more were asked for" in told and told.count("error: ") == 1
    assert re.search(r"held \d\.\d\d GiB \(parameters 0.00, gradients 0.00, optimizer state 0.00, rest \d\.\d\d\)", told)
    assert re.search(r"`ulimit -v` gives the process \d+\.\d\d GiB", told)
    assert "It was the first step of this start" in told
    assert "Set batch.lanes=4 in place of 2: the micro-batches that the device computes then have 2 in place of 4 samples" in told
    finished = train.run(*settings, "batch.lanes=4")
    assert finished.code == 0, finished.output


def test_memory_that_runs_out_later_is_told_so_and_the_run_goes_on_with_the_lanes_that_it_says(train: Runner) -> None:
    settings = (*hungry(train, after=6), "steps=4", "batch.lanes=2", "checkpoint.every=1")  # step 3 makes the passes 5 and 6
    told = last_lines(ended(train.start(*settings)))
    assert "out of memory in step 3" in told and "2 steps had fitted, so that something has grown since" in told
    [resume] = re.findall(r"With (run.resume_from=\S+) and (run.allow_changes=\S+) it goes on from step 2", told)
    finished = train.run(*settings, "batch.lanes=4", *resume)
    assert finished.code == 0, finished.output
    assert "step-00000002, step 2" in finished.output


def test_a_micro_batch_of_one_sample_has_other_mends(train: Runner) -> None:
    told = last_lines(ended(train.start(*hungry(train, gib=2.8), "steps=3", "batch.lanes=8")))
    assert "A micro-batch of 1 cannot be cut further by batch.lanes" in told and "Set batch.lanes" not in told


def test_the_process_that_runs_out_of_memory_says_so_and_the_other_ends_too(train: Runner) -> None:
    finished = ended(train.start(*hungry(train, rank=1), "steps=3", "batch.lanes=2", processes=2))
    assert "[process 1] error: out of memory in step 1: 2.80 GiB" in last_lines(finished)
    assert finished.output.splitlines()[-1].startswith("[process 0] error: another process has ended")


@pytest.mark.parametrize("processes", [1, 2])
def test_memory_that_runs_out_in_an_evaluation_leaves_the_training_so_far(train: Runner, processes: int) -> None:
    made.shards(train.folder / "set", [8], "validation")
    settings = (*hungry(train, evaluation="true", rank=processes - 1), "steps=3", "batch.lanes=2")
    finished = ended(train.start(*settings, "evaluate.every=2", "checkpoint.every=3", processes=processes))
    told = last_lines(finished)
    assert "error: out of memory in the evaluation after step 2: 2.80 GiB" in told and told.count("error: ") == 1
    assert left.steps(train) == [2]


# --- parts of a model that are not trained ---


def test_a_frozen_backbone_trains_to_the_same_bits_on_two_processes(tmp_path: Path) -> None:
    found = {weights_of(tmp_path / str(count), count, "model.name=tests.spies_failure:Frozen") for count in (1, 2)}
    assert len(found) == 1


@pytest.mark.parametrize("sometimes", ["false", "true"])
def test_a_layer_without_a_part_in_the_loss_is_named_on_two_processes_and_trains_on_one(train: Runner, sometimes: str) -> None:
    settings = (config(train), "steps=3", "model.name=tests.spies_failure:Unused", f"model.sometimes={sometimes}")
    finished = ended(train.start(*settings, processes=2))
    told = last_lines(finished)
    assert "error: extra.weight, extra.bias: no part in the loss" in told and "requires_grad_(False)" in told
    finished = train.run(*settings)
    assert finished.code == 0, finished.output


def weights_of(folder: Path, processes: int, *settings: str) -> str:
    train = Runner(folder)
    finished = train.run(config(train), "steps=5", *settings, processes=processes)
    assert finished.code == 0, finished.output
    return left.weights(train)


# --- the disk ---


WIDE = (LINEAR, "model.width=400", "steps=6", "checkpoint.every=2")  # 181 203 parameters and their momentum: 1.4 MB


@pytest.mark.parametrize(("processes", "environment"), [(1, {}), (2, FSDP)], ids=["one writes", "both write parts"])
def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole_and_with_room_it_goes_on(
    train: Runner, small_disk: Path, processes: int, environment: dict[str, str]
) -> None:
    train.environment |= environment
    expected = weights_of(train.folder / "undisturbed", 1, *WIDE)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(6_150_000))
    train.outputs.symlink_to(small_disk)
    finished = ended(train.start(config(train), *WIDE, processes=processes))
    told = last_lines(finished)
    assert told.count("error: ") == 1
    assert "No space left on device" in told and "It needs 1.4 MB" in told and "are free in" in told
    [folder] = train.outputs.glob("run-*")
    assert [path.name for path in sorted(folder.glob("checkpoints/*"))] == ["step-00000002"]
    filler.unlink()
    finished = train.run(config(train), *WIDE, "checkpoint.keep=1", processes=processes)
    assert finished.code == 0, finished.output
    assert "step-00000002, step 2" in finished.output
    assert left.json.loads((folder / "summary.json").read_text())["weights_sha256"] == expected


def test_a_limit_on_the_size_of_files_is_told_as_what_it_is(train: Runner) -> None:
    running = train.start(config(train), *WIDE, "steps=3000")
    resource.prlimit(running.processes[0].pid or 0, resource.RLIMIT_FSIZE, (500_000, 500_000))
    finished = ended(running)
    assert "ulimit -f" in last_lines(finished)
    assert not list(left.folder(train).glob("checkpoints/*step*"))


def test_a_run_folder_that_is_removed_meanwhile_ends_the_run_in_words(train: Runner) -> None:
    train.environment["SPY_SECONDS"] = "0.05"
    running = train.start(config(train), LINEAR, "steps=500", "checkpoint.every=10")
    running.wait_for("step 3/")
    left.folder(train).rename(train.folder / "elsewhere")
    assert "was removed or replaced" in last_lines(ended(running))
