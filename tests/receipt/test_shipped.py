"""The receipts that come with the project are of runs that this code still makes."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from tests.conftest import ROOT
from train import cli
from train.bench.conditions import cpu
from train.receipt import document

SHIPPED = sorted((ROOT / "receipts").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_run_is_made_again(path: str) -> None:
    """By this code and not by the commit's; on another kind of CPU the last bits may differ."""
    found = CliRunner().invoke(cli.main, ["verify", str(path), "--here", "--processes", "2", "--json"])
    verdict = json.loads(found.stdout)["verdict"]
    then = document.read(path)["environments"][0]["cpu"]
    same_cpu = (then["model"], then["kernels"]) == (cpu(), torch.backends.cpu.get_cpu_capability())
    assert verdict == "IDENTICAL" or (verdict == "WITHIN TOLERANCE" and not same_cpu), found.output


def test_there_is_one() -> None:
    assert SHIPPED
    for path in SHIPPED:
        receipt = document.read(path)
        assert receipt["result"]["status"] == "finished"
        assert not receipt["environments"][0]["code"]["diff"]
