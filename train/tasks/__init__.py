"""What is learned, a task a file: how a row becomes a sample, a batch becomes a loss, and outputs become metrics.

To add one, write its file, name it in `TASKS` and in the schema's `task`, and give it what `Task` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from train.arguments import imported
from train.config import Config, Data, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from train.data.loader import Batch, Decoder
    from train.data.source import Sources

TASKS = {
    "image_classification": "train.tasks.image_classification:ImageClassification",
    "language_modeling": "train.tasks.language_modeling:LanguageModeling",
}


class Task(Protocol):
    """What a run needs to know of a task. A batch counts by its weight: in the mean over a step, and in each metric."""

    keys: ClassVar[frozenset[str]]  # of the section `data`, that no other task reads
    sources: Sources
    given: Mapping[str, int]  # arguments of a model that the data give
    identity: Mapping[str, Any]  # by what the data are known again beside their files

    @classmethod
    def open(cls, config: Config, device: torch.device, say: Callable[[str], None]) -> Task:
        """The task of a configuration, with its data opened. `say` is told of what may take long, before it begins."""

    @staticmethod
    def metrics(data: Data) -> Mapping[str, bool]:
        """Each metric, and whether more of it is better; the first one judges the weights where the configuration says none."""

    def decoder(self, seed: int, *, training: bool) -> Decoder: ...

    def weight(self, batch: Batch) -> int: ...

    def fits(self, model: nn.Module, batch: Batch, name: str) -> None:
        """Raise UsageError when the model, called `name`, cannot take such samples or gives other outputs than wanted."""

    def inputs(self, batch: Batch) -> Tensor:
        """What the model is called with; its first dimension is the samples."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """The sum of a batch's losses, a scalar, from what the model gave."""

    def sums(self, output: Any, batch: Batch) -> Mapping[str, float]:
        """What a batch adds to sums that, divided by the weight of all, are means."""

    def measured(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics, from the means of `sums`."""


def find(name: str) -> type[Task]:
    task: type[Task] = imported(TASKS[name])  # type: ignore[assignment]  # a class
    return task


def judge(config: Config) -> tuple[str, bool]:
    """The metric that decides which weights are the best, and whether more of it is better."""
    metrics = find(config.task).metrics(config.data)
    name = next(iter(metrics)) if config.evaluate.metric == "auto" else config.evaluate.metric
    return name, metrics[name]


def check(config: Config) -> list[Problem]:
    """What the task of a configuration knows nothing of."""
    task = find(config.task)
    others = frozenset[str]().union(*(find(name).keys for name in TASKS)) - task.keys
    defaults = {key: Data.model_fields[key].default for key in others}
    problems = [
        Problem(f"data.{key}", f"means nothing to task {config.task}; remove it")
        for key in sorted(others)
        if getattr(config.data, key) != defaults[key]
    ]
    metrics = task.metrics(config.data)
    if config.evaluate.metric not in ("auto", *metrics):
        problems.append(Problem("evaluate.metric", f"must be auto, {' or '.join(metrics)}, not '{config.evaluate.metric}'"))
    return problems
