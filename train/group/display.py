"""One progress line for the runs of a group: the step of the last one, the means of their values, and what they do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from train.group.summary import deviation
from train.progress import Progress

_JOINED: dict[str, Callable[[list[float]], float]] = {
    "loss": fmean,
    "lr": fmean,
    "samples_per_second": sum,
    "data_wait": fmean,
    "memory_gib": max,
}


class GroupDisplay:
    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._steps: dict[int, int] = {}
        self._values: dict[int, Mapping[str, float]] = {}

    def of(self, seed: int, total_steps: int, step: int) -> SeedDisplay:
        """The part of one run, which has made `step` steps."""
        self._progress = self._progress or Progress(total_steps, step)
        self._steps[seed] = step
        return SeedDisplay(self, seed)

    def update(self, seed: int, step: int, values: Mapping[str, float] | None) -> None:
        assert self._progress
        self._steps[seed] = step
        if values is not None:
            self._values[seed] = values
        if not self._steps.keys() <= self._values.keys():  # not all have told theirs
            self._progress.update(min(self._steps.values()))
            return
        found = list(self._values.values())
        joined = {name: join([values[name] for values in found]) for name, join in _JOINED.items()}
        if len(found) > 1:
            joined["loss_spread"] = deviation([values["loss"] for values in found])
        self._values.clear()
        self._progress.update(min(self._steps.values()), joined)

    def line(self, seed: int, text: str) -> None:
        assert self._progress
        self._progress.line(f"seed {seed}: {text}")

    def end(self, seed: int) -> None:
        """One that has ended is waited for no more."""
        assert self._progress
        self._steps.pop(seed, None)
        if not self._steps:
            self._progress.close()


class SeedDisplay:
    """Shows one of the runs."""

    def __init__(self, group: GroupDisplay, seed: int) -> None:
        self._group, self._seed = group, seed

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        self._group.update(self._seed, step, values)

    def line(self, text: str) -> None:
        self._group.line(self._seed, text)

    def close(self) -> None:
        self._group.end(self._seed)
