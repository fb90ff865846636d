"""The one idea: a run is a function of its configuration, never of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Runner

# Everything that could depend on the machine at once: BatchNorm, dropout, random crops, clipping, averaged weights,
# batches that straddle epochs (200 samples, 32 a step), and more than thirty steps.
EVERYTHING = (
    "steps=32",
    "batch.size=32",
    "batch.lanes=4",
    "data.transforms.train=[{RandomCrop: {size: 8, padding: 1}}]",
    "optimizer.clip_norm=0.5",
    "ema.decay=0.9",
    "evaluate.every=16",
    "checkpoint.every=0",
)


def weights(outputs: Path) -> tuple[str, float]:
    """The hash of the final weights and the accuracy of the only run in a folder."""
    [summary] = outputs.glob("*/summary.json")
    facts = json.loads(summary.read_text())
    assert facts["status"] == "finished"
    return facts["weights_sha256"], facts["metrics"]["validation/accuracy"]


@pytest.mark.parametrize("streaming", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_weights_are_the_same_bits_on_any_number_of_processes_and_workers(tmp_path: Path, streaming: str) -> None:
    found = {}
    for processes, workers in [(1, 0), (1, 2), (2, 1), (4, 0)]:
        train = Runner(tmp_path / f"{processes}-{workers}")
        train.folder.mkdir()
        finished = train.run(*EVERYTHING, f"data.streaming={streaming}", f"data.workers={workers}", processes=processes)
        assert finished.code == 0, finished.output
        found[processes, workers] = weights(train.outputs)
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_a_quantised_optimizer_gives_the_same_bits_on_two_processes_and_after_a_stop(tmp_path: Path) -> None:
    settings = (*EVERYTHING, "optimizer={name: torchao/AdamW8bit, lr: 4e-3, clip_norm: 0.5}", "data.workers=0")
    found = set()
    for processes, stops in [(1, ()), (2, ("--stop-at", "9"))]:
        train = Runner(tmp_path / str(processes))
        train.folder.mkdir()
        if stops:
            stopped = train.run(*settings, *stops, processes=processes)
            assert stopped.code == 75, stopped.output
        finished = train.run(*settings, processes=processes)
        assert finished.code == 0, finished.output
        found.add(weights(train.outputs))
    assert len(found) == 1, found
