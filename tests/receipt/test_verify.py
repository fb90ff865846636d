"""A stranger makes a run again from its receipt, and is told whether it is the same, and why not."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests import left
from tests.conftest import ROOT, Runner
from tests.receipt.runs import DIFFERENT, IDENTICAL, UNKNOWN, rewrite, trained, verify
from train import cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A run on data of its own."""
    train = Runner(tmp_path_factory.mktemp("run"))
    shutil.copytree(ROOT / "train/data/digits", train.folder / "data")
    return trained(train, f"data.path={train.folder / 'data'}")


@pytest.fixture
def copy(run: Runner, tmp_path: Path) -> Runner:
    """The same, to be changed."""
    shutil.copytree(run.folder, tmp_path / "copy")
    return Runner(tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_run_is_made_again_on_any_number_of_processes(run: Runner, processes: int) -> None:
    found = verify(run, "--processes", str(processes), "--json")
    assert found.exit_code == IDENTICAL, found.output
    [piece] = json.loads(found.stdout)["pieces"]
    assert piece["weights_compared_at"] == [4, 8]
    assert piece["steps_compared"] == 4
    assert piece["differences"] == ([] if processes == 1 else ["accelerate: mode: single -> ddp"])


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


def test_a_plot_is_drawn_where_they_part(run: Runner, tmp_path: Path) -> None:
    words = ["diff", str(left.folder(run)), str(left.folder(run)), "--plot", str(tmp_path / "losses.svg")]
    assert CliRunner().invoke(cli.main, words).exit_code == IDENTICAL
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")
