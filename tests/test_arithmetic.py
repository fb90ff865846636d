"""A step is one step of gradient descent on the mean over its samples, whatever it is split into: computed here in numpy."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests import made
from tests.conftest import Runner
from tests.spied import Spied, spied

Weights = tuple[NDArray[np.float64], NDArray[np.float64]]
DESCENT = ("optimizer.lr=1", "optimizer.momentum=0", "model.norm=false", "model.dropout=0", "model.zero=true")


def start() -> Weights:
    return np.zeros((made.CLASSES, 3 * made.SIDE**2)), np.zeros(made.CLASSES)


def descend(weights: Weights, ids: list[int], rate: float = 1.0) -> tuple[Weights, float, float]:
    """One step on the mean cross-entropy of a linear classifier; also the loss and the gradient's norm before it."""
    matrix, bias = weights
    inputs = np.stack([made.pixels(number).transpose(2, 0, 1).ravel() / 255 for number in ids])
    labels = np.array([made.label_of(number) for number in ids])
    logits = inputs @ matrix.T + bias
    logits -= logits.max(axis=1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(ids)), labels]).mean()
    errors = (chances - np.eye(made.CLASSES)[labels]) / len(ids)
    gradient = errors.T @ inputs, errors.sum(axis=0)
    norm = math.sqrt(sum(np.square(part).sum() for part in gradient))
    return (matrix - rate * gradient[0], bias - rate * gradient[1]), float(loss), norm


def checkpoint_weights(run: Spied, step: int) -> Weights:
    tensors = load_file(run.folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    return tensors["linear.weight"].astype(np.float64), tensors["linear.bias"].astype(np.float64)


def assert_close(found: Weights, expected: Weights) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_each_step_of_a_run_is_the_one_computed_by_hand(train: Runner) -> None:
    """18 samples, 8 a step: the third step has the last 2 of one epoch and 6 of the next, and counts each of them once."""
    made.shards(train.folder / "set", [18])
    run = spied(train, made.config(train.folder), *DESCENT, "epochs=2", "checkpoint.every=1", "checkpoint.keep=9")
    assert [len(step) for step in run.steps()] == [8] * 5  # the last batch is full too: 4 samples of it are of a third epoch
    order = list(itertools.chain.from_iterable(run.steps()))
    assert [sorted(order[:18]), sorted(order[18:36])] == [list(range(18))] * 2
    weights = start()
    losses = dict(run.logged("train/loss"))
    norms = dict(run.logged("train/grad_norm"))
    for step, ids in enumerate(run.steps(), start=1):
        weights, loss, norm = descend(weights, ids)
        assert float.fromhex(losses[step]) == pytest.approx(loss, abs=1e-5)
        assert float.fromhex(norms[step]) == pytest.approx(norm, rel=1e-5)
        assert_close(checkpoint_weights(run, step), weights)
    assert run.summary["step"] == 5


@pytest.mark.parametrize(("lanes", "processes"), [(1, 1), (2, 2), (5, 1), (10, 1), (5, 5)])
def test_a_step_is_that_of_one_big_batch_for_every_split(train: Runner, lanes: int, processes: int) -> None:
    made.shards(train.folder / "set", [10])
    settings = (*DESCENT, "steps=1", "batch.size=10", f"batch.lanes={lanes}", "checkpoint.every=1")
    run = spied(train, made.config(train.folder), *settings, processes=processes)
    [ids] = run.steps(lanes=lanes)
    assert sorted(ids) == list(range(10))
    weights, loss, norm = descend(start(), ids)
    assert loss == pytest.approx(math.log(made.CLASSES))
    assert float.fromhex(run.logged("train/loss")[0][1]) == pytest.approx(loss, abs=1e-6)
    assert float.fromhex(run.logged("train/grad_norm")[0][1]) == pytest.approx(norm, rel=1e-6)
    assert_close(checkpoint_weights(run, 1), weights)


@pytest.mark.parametrize("processes", [1, 2])
def test_lanes_with_fewer_samples_count_by_their_samples(train: Runner, processes: int) -> None:
    """Where samples are left out the mean is over those that are there, not a mean of the lanes' means."""
    made.class_folders(train.folder / "set", range(10))
    for number in (0, 1, 5):  # which leaves lanes of 2 samples with 0, 1 or 2, as the order has it
        [file] = (train.folder / "set").rglob(f"{number:03d}.png")
        file.write_bytes(b"")
    settings = (*DESCENT, "steps=1", "batch.size=10", "batch.lanes=2", "checkpoint.every=1", "data.on_error=skip")
    run = spied(train, made.config(train.folder), *settings, processes=processes)
    ids = [number for step in run.passes for number in step["ids"]]
    assert sorted(ids) == [2, 3, 4, 6, 7, 8, 9]
    weights, loss, norm = descend(start(), ids)
    assert float.fromhex(run.logged("train/loss")[0][1]) == pytest.approx(loss, abs=1e-6)
    assert float.fromhex(run.logged("train/grad_norm")[0][1]) == pytest.approx(norm, rel=1e-6)
    assert_close(checkpoint_weights(run, 1), weights)


def test_a_clipped_step_is_as_long_as_the_clip_says(train: Runner) -> None:
    made.shards(train.folder / "set", [10])
    settings = (*DESCENT, "steps=1", "batch.size=10", "batch.lanes=2", "checkpoint.every=1", "optimizer.clip_norm=0.125")
    run = spied(train, made.config(train.folder), *settings)
    _, _, norm = descend(start(), run.steps(lanes=2)[0])
    assert norm > 0.125
    matrix, bias = checkpoint_weights(run, 1)
    assert math.sqrt(np.square(matrix).sum() + np.square(bias).sum()) == pytest.approx(0.125, rel=1e-4)
    assert run.metrics[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_averaged_weights_are_the_average_that_their_decay_says(train: Runner) -> None:
    made.shards(train.folder / "set", [8])
    settings = (*DESCENT, "steps=4", "checkpoint.every=1", "checkpoint.keep=9", "ema.decay=0.75")
    run = spied(train, made.config(train.folder), *settings)
    average = checkpoint_weights(run, 1)  # the first update takes the weights themselves
    for step in (2, 3, 4):
        weights = checkpoint_weights(run, step)
        average = (0.75 * average[0] + 0.25 * weights[0], 0.75 * average[1] + 0.25 * weights[1])
    final = load_file(Path(run.folder) / "model" / "model.safetensors")
    assert_close((final["linear.weight"].astype(np.float64), final["linear.bias"].astype(np.float64)), average)
