"""Batches that come through workers are those of a process without workers, in their own memory."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import made
from tests.conftest import ROOT
from train.config.schema import Data
from train.data.loader import Batch, load
from train.data.pictures import open_pictures
from train.data.plan import Share, evaluation_plan, training_plan

SHARDS = (10, 3, 7)


def fields(row: dict[str, Any], epoch: int, key: int) -> dict[str, Tensor]:
    """Of several types and shapes, whose sizes are no multiples of another's; one sample is bad."""
    if key == 5:
        raise ValueError("five")
    drawn = torch.Generator().manual_seed(key)
    return {
        "picture": torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8, generator=drawn),
        "odd": torch.randint(0, 2, (3,), dtype=torch.bool, generator=drawn),
        "label": torch.tensor(key + epoch),
        "noise": torch.randn(3, 5, 7, generator=drawn).double(),
    }


def batches(folder: Path, workers: int, count: int) -> list[Batch]:
    source = open_pictures(Data(path=str(folder), classes=3))[0].train
    loader = load(
        source, fields, lambda: training_plan(source, Share(4, 4, range(1)), 0, seed=0, shuffle=True, block=6),
        workers=workers, prefetch=2, pin_memory=False,
    )  # fmt: skip
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_the_same_with_workers_and_stay_as_they_are(tmp_path: Path, workers: int) -> None:
    folder = made.shards(tmp_path / "set", SHARDS)
    alone, together = batches(folder, 0, 40), batches(folder, workers, 40)  # more than there are slots
    for one, other in zip(alone, together, strict=True):
        assert (one.keys, one.bad, one.digest) == (other.keys, other.bad, other.digest)
        assert list(one.fields) == list(other.fields) == ["picture", "odd", "label", "noise"]
        for name, value in one.fields.items():
            assert value.dtype == other.fields[name].dtype and value.stride() == other.fields[name].stride()
            assert torch.equal(value, other.fields[name])
    assert any(one.bad for one in alone)


def test_workers_that_stay_give_an_evaluation_again(tmp_path: Path) -> None:
    source = open_pictures(Data(path=str(made.shards(tmp_path / "set", SHARDS)), classes=3))[0].train
    loader = load(source, fields, lambda: evaluation_plan(source, 3, 0, 1), workers=2, prefetch=1, pin_memory=False)
    loader.start_workers()
    first, *others = ([batch.keys for batch in loader] for _ in range(4))
    assert sum(map(len, first)) == sum(SHARDS) - 1
    assert others == [first] * 3


STALLED = """
import os, signal, sys, threading, time
from tests.data.test_loader import fields
from train.config.schema import Data
from train.data.loader import load
from train.data.pictures import open_pictures

source = open_pictures(Data(path=sys.argv[1], classes=3))[0].train

def stalled():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(60)
    yield

loader = load(source, fields, stalled, workers=1, prefetch=2, pin_memory=False)
loader.start_workers()
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(3))
next(iter(loader))
"""


def test_a_signal_is_heard_while_the_first_records_are_read(tmp_path: Path) -> None:
    folder = made.shards(tmp_path / "set", SHARDS)
    assert subprocess.run([sys.executable, "-c", STALLED, str(folder)], cwd=ROOT, timeout=30).returncode == 3


def frozen(row: dict[str, Any], epoch: int, key: int) -> dict[str, Tensor]:
    return {"frozen": torch.tensor(gc.get_freeze_count())}


def test_a_worker_does_not_search_what_it_has_of_the_trainer_for_garbage(tmp_path: Path) -> None:
    source = open_pictures(Data(path=str(made.shards(tmp_path / "set", SHARDS)), classes=3))[0].train
    loader = load(source, frozen, lambda: evaluation_plan(source, 3, 0, 1), workers=1, prefetch=1, pin_memory=False)
    before = len(gc.get_objects())
    assert next(iter(loader)).fields["frozen"].min() >= before
