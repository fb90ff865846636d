"""What runs have left in their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import Runner


def folder(train: Runner) -> Path:
    """The only run folder."""
    [found] = train.outputs.iterdir()
    return found


def summary(train: Runner) -> dict[str, Any]:
    return facts(folder(train))


def facts(folder: Path) -> dict[str, Any]:
    """summary.json of a run folder."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def weights(train: Runner) -> str:
    """The hash of the final weights."""
    found = summary(train)
    assert found["status"] == "finished"
    return str(found["weights_sha256"])


def steps(train: Runner) -> list[int]:
    """The steps of the checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in train.outputs.glob("*/checkpoints/step-*"))


def lines(train: Runner) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (folder(train) / "metrics.jsonl").read_text().splitlines()]


def logged(train: Runner) -> list[int]:
    """The steps of the training lines in metrics.jsonl, as they follow each other."""
    return [line["step"] for line in lines(train) if "train/loss" in line]


def tensors(train: Runner) -> list[str]:
    """The names of the final weights."""
    from safetensors import safe_open

    with safe_open(folder(train) / "model" / "model.safetensors", "pt") as file:
        return list(file.keys())
