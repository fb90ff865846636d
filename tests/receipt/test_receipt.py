"""A receipt holds what made a run, and is noticed when it is not what was written."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import left
from tests.conftest import ROOT, Runner
from tests.receipt.runs import SHORT, receipt_of
from train.receipt import document
from train.receipt.environment import LONGEST_DIFF, code, digest

KEY = "0123456789abcdef0123456789abcdef01234567"


def test_a_receipt_says_what_made_the_run(train: Runner) -> None:
    train.environment["WANDB_API_KEY"] = KEY
    finished = train.run(*SHORT, "optimizer.lr=0.002", "batch.lanes=2", processes=2)
    assert finished.code == 0, finished.output
    receipt, summary = receipt_of(train), left.summary(train)
    assert receipt["config"]["optimizer"]["lr"] == 0.002
    assert receipt["places"]["optimizer.lr"] == "command line"
    assert receipt["config"]["data"]["path"] == "{checkout}/train/data/digits"  # and not where this machine has it
    assert receipt["lanes"] == 2
    assert receipt["result"] == summary
    [start], [environment] = receipt["starts"], receipt["environments"]
    assert (start["step"], start["processes"]) == (0, 2)
    assert environment["launch"]["mode"] == "ddp"
    assert environment["cpu"]["threads"] == 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert environment["code"]["commit"] == head
    assert environment["code"]["digest"] == digest(ROOT)
    assert environment["versions"]["packages"]["torch"].startswith("2.")
    assert [entry[0] for entry in receipt["trace"]] == [2, 4, 6, 8]
    assert [entry["step"] for entry in receipt["checkpoints"]] == [4, 8]
    assert receipt["checkpoints"][-1]["weights_sha256"] == summary["weights_sha256"]
    logged = {line["step"]: line for line in left.lines(train) if "train/loss" in line}
    assert [entry[1:3] for entry in receipt["trace"]] == [
        [logged[step]["train/loss"], logged[step]["train/grad_norm"]] for step in (2, 4, 6, 8)
    ]
    assert KEY not in (left.folder(train) / "receipt.json").read_text()


def test_the_samples_are_the_same_in_whichever_way_they_are_shared_out(tmp_path: Path) -> None:
    digests = set()
    for processes, workers, streaming in ((1, 0, "true"), (2, 1, "true"), (4, 0, "true")):
        train = Runner(tmp_path / f"{processes}-{workers}")
        train.folder.mkdir()
        finished = train.run(*SHORT, f"data.workers={workers}", f"data.streaming={streaming}", processes=processes)
        assert finished.code == 0, finished.output
        digests.add(tuple(entry[3] for entry in receipt_of(train)["trace"]))
    assert len(digests) == 1
    assert len(set(*digests)) == 4  # and other ones at each step


def test_a_resumed_run_keeps_its_history_and_enters_each_start(train: Runner) -> None:
    assert train.run(*SHORT, "--stop-at", "5").code == 75
    stopped = receipt_of(train)
    assert stopped["result"]["status"] == "stopped"
    assert train.run(*SHORT, "data.workers=1", processes=2).code == 0
    receipt = receipt_of(train)
    assert [(start["step"], start["processes"]) for start in receipt["starts"]] == [(0, 1), (5, 2)]
    assert len(receipt["environments"]) == 2  # one process, and two
    assert [entry[0] for entry in receipt["trace"]] == [2, 4, 6, 8]
    assert receipt["trace"][:2] == stopped["trace"]
    assert [entry["step"] for entry in receipt["checkpoints"]] == [4, 5, 8]


def test_a_long_run_has_a_small_receipt(train: Runner) -> None:
    from train.receipt import recorder

    keeper = object.__new__(recorder.Recorder)
    keeper._trace = []
    for step in range(10, 100_010, 10):
        keeper.step(step, 2.3025850929940455 / step, 1.2345678901234567, step)
    steps = [entry[0] for entry in keeper._trace]
    assert 2000 < len(steps) <= 4096
    assert len({later - earlier for earlier, later in pairwise(steps)}) == 1
    assert len(json.dumps(keeper._trace)) + LONGEST_DIFF < 2**20


def damaged(path: Path, change: Any) -> Path:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content["trace"][0].__setitem__(1, 0.1), "is not as it was written"),
        (lambda content: content.pop("data"), "is not as it was written"),
        (lambda content: content.update(schema=99), "has schema 99, and this program reads 2"),
        (lambda content: content.pop("schema"), "is no receipt: it has no `schema`"),
    ],
)
def test_what_is_no_longer_what_was_written_is_refused(train: Runner, change: Any, says: str) -> None:
    assert train.run(*SHORT, "steps=2").code == 0
    path = damaged(left.folder(train) / "receipt.json", change)
    with pytest.raises(document.UsageError, match=says):
        document.read(path)


def test_a_truncated_receipt_is_refused(train: Runner) -> None:
    assert train.run(*SHORT, "steps=2").code == 0
    path = left.folder(train) / "receipt.json"
    path.write_text(path.read_text()[:-100])
    with pytest.raises(document.UsageError, match="is not a whole receipt"):
        document.read(left.folder(train))
    with pytest.raises(document.UsageError, match="cannot be read"):
        document.read(left.folder(train) / "missing.json")


def test_changes_and_new_files_are_in_the_receipt_and_nothing_is_staged(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    before = code(clone)
    (clone / "train" / "seeds.py").write_text((clone / "train" / "seeds.py").read_text() + "# changed\n")
    (clone / "train" / "models" / "mine.py").write_text("WIDTH = 3\n")
    after = code(clone)
    assert (before["diff"], after["commit"]) == ("", before["commit"])
    assert "+# changed" in after["diff"] and "+WIDTH = 3" in after["diff"]
    assert before["digest"] != after["digest"]
    status = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert status == " M train/seeds.py\n?? train/models/mine.py\n"
