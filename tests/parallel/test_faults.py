"""What goes wrong in one process, under every mode that has several: uneven data, a bad sample, a process that dies, a layer
without a part in the loss. The run ends by itself, and says why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import Runner
from tests.parallel.test_launches import FSDP
from tests.parallel.test_tensor import TENSOR

SECONDS = 15  # within which a failure must have ended the run
MLP = "model={name: 'tests.parallel.nets:mlp'}"
CUTS = {
    "ddp": "",
    "fsdp": "",
    "pipeline": "parallel.pipeline={stages: 2, split_at: ['3']}",
    "tensor": "parallel.tensor={'1': columns, '3': rows}",
}
ENVIRONMENTS = {"fsdp": FSDP, "tensor": TENSOR}


def several(*quick: str) -> pytest.MarkDecorator:
    """All modes, of which some are tried by default and the others with --slow."""
    return pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode in quick else pytest.mark.slow) for mode in CUTS])


def runner(folder: Path, mode: str, sizes: tuple[int, ...]) -> tuple[Runner, tuple[str, ...]]:
    """A run of a mode on two processes, or on one, and what it is given."""
    made.shards(folder / "set", sizes)
    made.shards(folder / "set", [5], "validation")
    cut = CUTS.get(mode, "")
    return Runner(folder, ENVIRONMENTS.get(mode, {})), (made.config(folder), MLP, *([cut] if cut else []))


@several("pipeline")
def test_shards_of_uneven_length_end_with_every_sample_seen_by_all(mode: str, tmp_path: Path) -> None:
    """Trial B07: shards of 10, 3 and 7 rows, which two processes cannot share evenly."""
    metrics = {}
    for name, processes in ((mode, 2), ("single", 1)):
        train, given = runner(tmp_path / name, name, (10, 3, 7))
        finished = train.run(*given, "epochs=2", "evaluate.every=1 epoch", processes=processes)
        assert finished.code == 0, finished.output
        assert left.summary(train)["step"] == 5 and "of 20 samples" in finished.output
        metrics[name] = left.summary(train)["metrics"]
    assert metrics[mode] == pytest.approx(metrics["single"], rel=1e-2 if mode == "tensor" else 0)


@several("tensor")
def test_a_bad_sample_ends_all_and_is_named(mode: str, tmp_path: Path) -> None:
    """Trial B53. Unshuffled, sample 13 is in the second half of the second batch, which with DDP only the second process has."""
    train, given = runner(tmp_path, mode, (8,))
    row = made.json_lines(train.folder / "lines", [16]) / "pictures" / "13.png"
    row.write_bytes(made.png(13)[:60])
    began = time.monotonic()
    finished = train.run(*given, "steps=9", f"data.path={train.folder}/lines", "data.shuffle=false", processes=2)
    assert time.monotonic() - began < 2 * SECONDS
    assert finished.code == 1
    assert "error: train-00000-of-00001.jsonl row 13: cannot be decoded" in "\n".join(finished.output.splitlines()[-8:])
    assert "Traceback" not in finished.output


@several("fsdp", "pipeline")
def test_a_process_that_dies_takes_the_other_with_it(mode: str, tmp_path: Path) -> None:
    train, given = runner(tmp_path, mode, (10, 3, 7))
    running = train.start(*given, "steps=100000", processes=2)
    running.wait_for("step 3/")
    os.kill(running.processes[1].pid or 0, signal.SIGKILL)
    began = time.monotonic()
    finished = running.end()
    assert time.monotonic() - began < SECONDS
    assert finished.code == 1
    assert finished.output.splitlines()[-1].startswith("[process 0] error: another process has ended"), finished.output


@pytest.mark.parametrize("mode", ["fsdp", "pipeline"])
def test_a_layer_without_a_part_in_the_loss_is_kept_as_it_is_where_the_mode_allows_that(mode: str, tmp_path: Path) -> None:
    """Trial B54: with a frozen layer beside it; DDP refuses by its name what it would wait for (tests/test_failures.py)."""
    weights = set()
    residual = "model={name: 'tests.parallel.nets:Residual'}"
    for name, processes in ((mode, 2), ("single", 1)):
        train, given = runner(tmp_path / name, name, (10, 3, 7))
        cut = ["parallel.pipeline={stages: 2, split_at: [middle]}"] if name == "pipeline" else []
        finished = train.run(given[0], residual, *cut, "steps=4", processes=processes)
        assert finished.code == 0, finished.output
        weights.add(left.weights(train))
    assert len(weights) == 1
