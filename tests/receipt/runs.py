"""Short runs for the tests of receipts, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from click.testing import CliRunner, Result

from tests import left
from tests.conftest import Runner
from train import cli
from train.receipt import document

SHORT = ("steps=8", "tracking.every=2", "checkpoint.every=4", "checkpoint.keep=3", "evaluate.every=0", "data.workers=0")
IDENTICAL, TOLERATED, DIFFERENT, UNKNOWN = 0, 3, 4, 5


def trained(train: Runner, *settings: str) -> Runner:
    finished = train.run(*SHORT, *settings)
    assert finished.code == 0, finished.output
    return train


def receipt_of(train: Runner) -> dict[str, Any]:
    return document.read(left.folder(train))


def rewrite(train: Runner, change: Callable[[dict[str, Any]], None]) -> None:
    """A receipt that somebody else has written."""
    receipt = receipt_of(train)
    change(receipt)
    (left.folder(train) / document.NAME).write_text(document.sealed(receipt))


def verify(train: Runner, *words: str) -> Result:
    return CliRunner().invoke(cli.main, ["verify", str(left.folder(train)), *words])


def diff(*runs: Runner) -> Result:
    return CliRunner().invoke(cli.main, ["diff", *(str(left.folder(train)) for train in runs)])
