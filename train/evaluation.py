"""Metrics over a whole split, each sample once, the same numbers on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.data.loader import Batch
from train.errors import RunError
from train.parallel.processes import Processes
from train.stopping import Interrupted, StopRequest
from train.tasks import Task


class _Part(NamedTuple):
    """What one process has measured."""

    finished: bool
    failure: RunError | None
    weight: int  # of its samples
    skipped: int
    sums: dict[str, list[float]]


@torch.no_grad()
def evaluate(
    task: Task,
    model: Callable[[Tensor], Any],
    batches: Iterable[Batch],
    device: torch.device,
    processes: Processes,
    stop: StopRequest,
    blank: Batch | None = None,
    *,
    reports: bool = True,
) -> dict[str, float] | None:
    """The metrics over all processes' samples, and how many were left out if any; None when any process was asked to
    stop on the way. The RunError of one process is raised on all.

    Every batch gives its sums; they are added exactly (`math.fsum`), so that it does not matter which process had which batch.
    Where a pass needs all processes, those that have no batch left make theirs on the `blank` one. Where several have the same
    batches, one `reports`.
    """
    sums: dict[str, list[float]] = {}
    weight = skipped = 0
    finished = False
    failure: RunError | None = None
    iterator = iter(batches)
    while True:
        batch = None
        if not finished and failure is None:
            try:
                with stop.waiting():
                    batch = next(iterator)
            except StopIteration:
                finished = True
            except Interrupted:
                pass
            except RunError as error:
                failure = error
        if blank is not None:
            states = processes.gather(batch is not None, finished)
            if not states[:, 0].any() or not states.any(axis=1).all():  # all are at their end, or one fails or was asked to stop
                break
        elif batch is None:
            break
        passed = batch if batch is not None and batch.keys else blank
        if passed is not None:
            passed = passed.to(device)
            try:
                output = model(task.inputs(passed))
            except RunError as error:
                if blank is not None:  # the others wait in this pass
                    raise
                failure = error
        if batch is None or not reports or failure is not None:
            continue
        skipped += len(batch.bad)
        if batch.keys and passed is not None:
            weight += task.weight(batch)
            for name, value in task.sums(output, passed).items():
                sums.setdefault(name, []).append(value)
    parts = processes.gather_objects(_Part(finished, failure, weight, skipped, sums))
    for part in parts:
        if part.failure is not None:
            part.failure.everywhere = True
            raise part.failure
    if not all(part.finished for part in parts):
        return None
    weight, skipped = (sum(numbers) for numbers in zip(*((part.weight, part.skipped) for part in parts), strict=True))
    if weight == 0:
        raise RunError(f"none of the {skipped} validation samples can be read", everywhere=True)
    names = dict.fromkeys(name for part in parts for name in part.sums)
    means = {name: math.fsum(value for part in parts for value in part.sums.get(name, ())) / weight for name in names}
    return task.measured(means) | ({"skipped": float(skipped)} if skipped else {})
