"""Checkpoints whose contents can be told from any other's."""

from pathlib import Path

import torch

from train.checkpoint import Snapshot, read

MEGABYTE = 250_000  # float32 numbers


def snapshot(step: int, megabytes: float = 0.01) -> Snapshot:
    """Every number in it is its step, so that a mixture of two can be seen."""
    model = {"weight": torch.full((int(megabytes * MEGABYTE),), float(step)), "bias": torch.full((3,), float(step))}
    return Snapshot(step, {"model": model, "ema": {"weight": torch.full((5,), float(step))}}, {"position": 8 * step})


def assert_is_snapshot(path: Path, step: int) -> None:
    loaded = read(path)
    assert loaded.step == step
    assert loaded.state == {"position": 8 * step}
    assert {stem: [*tensors] for stem, tensors in loaded.tensors.items()} == {
        "model": ["bias", "weight"],
        "ema": ["weight"],
    }
    assert all((tensor == step).all() for tensors in loaded.tensors.values() for tensor in tensors.values())
