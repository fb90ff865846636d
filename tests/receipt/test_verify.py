"""A stranger makes a run again from its receipt, and is told whether it is the same, and why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests import left
from tests.conftest import HANG_SECONDS, ROOT, Runner
from tests.receipt.runs import SHORT, receipt_of
from train import cli
from train.receipt import document

IDENTICAL, TOLERATED, DIFFERENT, UNKNOWN = 0, 3, 4, 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A run on data of its own."""
    train = Runner(tmp_path_factory.mktemp("run"))
    shutil.copytree(ROOT / "train/data/digits", train.folder / "data")
    finished = train.run(*SHORT, f"data.path={train.folder / 'data'}")
    assert finished.code == 0, finished.output
    return train


@pytest.fixture
def copy(run: Runner, tmp_path: Path) -> Runner:
    """The same, to be changed."""
    shutil.copytree(run.folder, tmp_path / "copy")
    return Runner(tmp_path / "copy")


def verify(train: Runner, *words: str) -> Result:
    return CliRunner().invoke(cli.main, ["verify", str(left.folder(train)), *words])


def rewrite(train: Runner, change: Callable[[dict[str, Any]], None]) -> None:
    """A receipt that somebody else has written."""
    receipt = receipt_of(train)
    change(receipt)
    (left.folder(train) / document.NAME).write_text(document.sealed(receipt))


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_is_made_again_on_any_number_of_processes(run: Runner, processes: int) -> None:
    found = verify(run, "--processes", str(processes), "--json")
    assert found.exit_code == IDENTICAL, found.output
    [piece] = json.loads(found.stdout)["pieces"]
    assert piece["weights_compared_at"] == [4, 8]
    assert piece["steps_compared"] == 4
    assert piece["differences"] == ([] if processes == 1 else ["accelerate: mode: single -> ddp"])


def test_a_receipt_alone_is_enough_in_another_clone(run: Runner, tmp_path: Path) -> None:
    """Other folder, user's name, host's name and date, a dirty file and a new one: the code is taken as the receipt has it."""
    clone = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    (clone / "train" / "seeds.py").write_text("raise SystemExit('not this one')\n")
    (clone / "train" / "models" / "new.py").write_text("")
    shutil.copy(left.folder(run) / document.NAME, tmp_path)
    words = ["-m", "train", "verify", str(tmp_path / document.NAME), "--steps", "4"]
    environment = {**os.environ, "USER": "stranger", "HOSTNAME": "elsewhere", "PYTHONPATH": ""}
    found = subprocess.run(
        [sys.executable, *words], cwd=clone, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert found.returncode == IDENTICAL, found.stdout + found.stderr
    assert "as the receipt has it, and not this checkout's" in found.stderr
    assert "weights compared at step 4" in found.stdout
    listed = subprocess.run(["git", "worktree", "list"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1  # nothing is left


def test_other_pictures_are_found_and_named(copy: Runner) -> None:
    for shard in (copy.folder / "data").glob("train-*"):
        table = pq.read_table(shard)
        rows = table.to_pylist()
        pictures = [row["image"] for row in rows]
        for row, picture in zip(rows, [*pictures[1:], pictures[0]], strict=True):
            row["image"] = picture
        pq.write_table(type(table).from_pylist(rows, schema=table.schema), shard)
    found = verify(copy, "--data", str(copy.folder / "data"))
    assert found.exit_code == DIFFERENT, found.output
    assert "first difference at step 2: samples" in found.output
    assert "data: beginnings and ends of the files" in found.output


@pytest.mark.slow
def test_a_renamed_file_is_named_and_changes_nothing(copy: Runner) -> None:
    for shard in (copy.folder / "data").glob("train-*"):
        shard.rename(shard.with_name(shard.name.replace("train-", "train-a")))
    found = verify(copy, "--data", str(copy.folder / "data"))
    assert found.exit_code == IDENTICAL, found.output
    assert "data: names of the files" in found.output


@pytest.mark.slow
def test_other_libraries_are_named_and_tolerated(copy: Runner) -> None:
    """A receipt from a machine with another patch version of torch, whose losses are a little different."""

    def elsewhere(receipt: dict[str, Any]) -> None:
        receipt["environments"][-1]["versions"]["packages"]["torch"] = "2.14.0"
        for entry in receipt["trace"][2:]:
            entry[1] *= 1.001
        receipt["checkpoints"][-1]["weights_sha256"] = receipt["result"]["weights_sha256"] = "0" * 64

    rewrite(copy, elsewhere)
    found = verify(copy)
    assert found.exit_code == TOLERATED, found.output
    assert "WITHIN TOLERANCE" in found.output and "losses within 5%" in found.output
    assert "versions: torch: 2.14.0 -> " in found.output
    assert "first difference at step 6: loss" in found.output


@pytest.mark.slow
def test_numbers_that_nothing_explains_are_different(copy: Runner) -> None:
    rewrite(copy, lambda receipt: receipt["trace"][1].__setitem__(1, receipt["trace"][1][1] * 1.001))
    found = verify(copy)
    assert found.exit_code == DIFFERENT, found.output
    assert "first difference at step 4: loss" in found.output


@pytest.mark.slow
def test_a_piece_between_checkpoints_and_all_of_them(run: Runner) -> None:
    piece = verify(run, "--segment", "2", "--json")
    assert piece.exit_code == IDENTICAL, piece.output
    [facts] = json.loads(piece.stdout)["pieces"]
    assert facts["what"] == "from step 4 to step 8"
    assert (facts["weights_compared_at"], facts["steps_compared"]) == ([8], 2)
    everything = verify(run, "--all-segments", "--json")
    assert everything.exit_code == IDENTICAL, everything.output
    assert [facts["weights_compared_at"] for facts in json.loads(everything.stdout)["pieces"]] == [[4], [8]]


@pytest.mark.parametrize(
    ("change", "words", "says"),
    [
        (lambda receipt: receipt["environments"][-1]["code"].update(commit="0" * 40, digest="0"), [], "commit 0000"),
        (lambda receipt: receipt["environments"][-1]["code"].update(commit=None, digest="0"), [], "no checkout of git"),
        (lambda receipt: receipt["config"]["data"].update(path="/no/such/data"), [], "there is no /no/such/data"),
        (lambda receipt: receipt["config"]["model"].update(name="gone"), [], "gone"),
    ],
)
def test_what_is_missing_is_told_in_a_line(
    copy: Runner, change: Callable[[dict[str, Any]], None], words: list[str], says: str
) -> None:
    rewrite(copy, change)
    found = verify(copy, *words)
    assert found.exit_code == UNKNOWN, found.output
    assert says in found.output


def test_steps_and_segments_that_there_are_not_are_refused(run: Runner) -> None:
    """In the process of whoever calls it, which keeps its own ways with signals."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
    assert "the receipt ends at step 8" in verify(run, "--steps", "9").output
    assert "there are 1 to 2" in verify(run, "--segment", "3").output
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)] == handlers


def diff(*runs: Runner) -> Result:
    return CliRunner().invoke(cli.main, ["diff", *(str(left.folder(train)) for train in runs)])


def another(folder: Path, *settings: str, environment: dict[str, str] | None = None, processes: int = 1) -> Runner:
    folder.mkdir()
    train = Runner(folder, environment or {})
    finished = train.run(*SHORT, *settings, processes=processes)
    assert finished.code == 0, finished.output
    return train


def test_what_differs_between_two_runs_is_named(tmp_path: Path) -> None:
    plain = another(tmp_path / "plain")
    (tmp_path / "commented.yaml").write_text(f"# a comment\nbase: {ROOT / 'configs/digits.yaml'}\n")
    commented = another(tmp_path / "commented", str(tmp_path / "commented.yaml"))
    assert diff(plain, commented).exit_code == IDENTICAL
    other = diff(plain, another(tmp_path / "rate", "optimizer.lr=0.003"))
    assert other.exit_code == DIFFERENT
    assert "config: optimizer.lr: 0.004 -> 0.003" in other.output
    threads = diff(plain, another(tmp_path / "threads", "run.threads=2"))
    assert "config: run.threads: auto -> 2" in threads.output
    precise = diff(plain, another(tmp_path / "bf16", environment={"ACCELERATE_MIXED_PRECISION": "bf16"}))
    assert precise.exit_code == DIFFERENT
    assert "accelerate: precision: no -> bf16" in precise.output


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = another(tmp_path / "whole")
    train = Runner(tmp_path / "pieces")
    train.folder.mkdir()
    for stop, processes in ((2, 1), (3, 2), (6, 4)):
        assert train.run(*SHORT, "--stop-at", str(stop), processes=processes).code == 75
    assert train.run(*SHORT).code == 0
    found = diff(whole, train)
    assert found.exit_code == IDENTICAL, found.output
    assert verify(train).exit_code == IDENTICAL


def test_a_plot_is_drawn_where_they_part(run: Runner, tmp_path: Path) -> None:
    words = ["diff", str(left.folder(run)), str(left.folder(run)), "--plot", str(tmp_path / "losses.svg")]
    assert CliRunner().invoke(cli.main, words).exit_code == IDENTICAL
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")
