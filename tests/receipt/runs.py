"""Short runs for the tests of receipts."""

from __future__ import annotations

from typing import Any

from tests import left
from tests.conftest import Runner
from train.receipt import document

SHORT = ("steps=8", "tracking.every=2", "checkpoint.every=4", "checkpoint.keep=3", "evaluate.every=0", "data.workers=0")


def receipt_of(train: Runner) -> dict[str, Any]:
    return document.read(left.folder(train))
