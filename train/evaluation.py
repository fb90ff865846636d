"""Metrics over a whole split, each sample once, the same numbers on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.data.loader import Batch
from train.parallel.processes import Processes
from train.stopping import Interrupted, StopRequest
from train.tasks.image_classification import ImageClassification


@torch.no_grad()
def evaluate(
    task: ImageClassification,
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    processes: Processes,
    stop: StopRequest,
) -> dict[str, float] | None:
    """The mean of each metric over all processes' samples; None when any process was asked to stop on the way.

    Every batch gives its sums; they are added exactly (`math.fsum`), so that it does not matter which process had which batch.
    """
    sums: dict[str, list[float]] = {name: [] for name in task.higher_is_better}
    samples = 0
    model.eval()
    iterator = iter(batches)
    finished = False
    try:
        while True:
            with stop.waiting():
                batch = next(iterator)
            if batch.keys:
                samples += len(batch.keys)
                for name, value in task.sums(model, batch.to(device)).items():
                    sums[name].append(value)
    except StopIteration:
        finished = True
    except Interrupted:
        pass
    model.train()
    everyone = processes.gather_objects((finished, samples, sums))
    if not all(finished for finished, _, _ in everyone):
        return None
    total = sum(samples for _, samples, _ in everyone)
    return {name: math.fsum(value for _, _, part in everyone for value in part[name]) / max(total, 1) for name in sums}
