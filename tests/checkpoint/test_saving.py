"""A checkpoint is written beside the training, one at a time, and what becomes of it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from train import checkpoint
from train.checkpoint import Snapshot
from train.errors import RunError
from train.parallel.processes import Processes
from train.saving import Saver


class One:
    """What a single process is to Accelerate."""

    process_index, num_processes = 0, 1


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    yield Saver(tmp_path / "checkpoints", 2, Processes(cast(Any, One())), torch.device("cpu"))


def snapshot(step: int) -> Snapshot:
    return Snapshot(step, {"model": {"weight": torch.full((3,), float(step))}}, {"position": step})


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Closed, it holds every write; the disk could not be slower."""
    opened, write = threading.Event(), checkpoint.write

    def slow(folder: Path, one: Snapshot) -> Path:
        assert opened.wait(60)
        return write(folder, one)

    monkeypatch.setattr(checkpoint, "write", slow)
    return opened


def test_saving_does_not_wait_for_the_disk_and_finishing_does(saver: Saver, gate: threading.Event) -> None:
    saver.save(snapshot(1), None)
    assert not saver.failed
    assert checkpoint.steps(saver.folder) == {}
    threading.Timer(0.2, gate.set).start()
    saver.finish()
    assert list(checkpoint.steps(saver.folder)) == [1]


def test_a_second_save_waits_for_the_first(saver: Saver, gate: threading.Event) -> None:
    saver.save(snapshot(1), None)
    threading.Timer(0.2, gate.set).start()
    saver.save(snapshot(2), None)
    assert 1 in checkpoint.steps(saver.folder)
    saver.save(snapshot(3), best=1)
    saver.finish()
    assert list(checkpoint.steps(saver.folder)) == [1, 2, 3]  # the newest two, and the best


def test_what_the_disk_refuses_is_raised_once_by_whoever_asks_next(saver: Saver) -> None:
    deadline = time.monotonic() + 60
    saver.folder.write_text("a file where the folder should be")
    for ask in (saver.finish, lambda: saver.save(snapshot(2), None)):
        saver.save(snapshot(1), None)
        with pytest.raises(RunError, match=r"cannot save .*step-00000001"):
            ask()
        assert not saver.failed
    saver.save(snapshot(1), None)
    while not saver.failed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    saver.settle()
    saver.finish()
