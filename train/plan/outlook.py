"""What is to be expected of each mode on so many devices, and which one to take."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from train.bench.setups import read_modes
from train.config import Config
from train.errors import UsageError
from train.parallel.lanes import sharing_problem
from train.parallel.mode import config_problems
from train.plan.modes import FORECAST, Line, needs
from train.plan.timing import Timing

# The modes as they are preferred where they fit, and how a run of each is started.
_LAUNCH = {
    "ddp": "accelerate launch --multi_gpu --num_processes {devices} train/main.py",
    "fsdp": "accelerate launch --config_file configs/accelerate/fsdp2.yaml --num_processes {devices} train/main.py",
    "pipeline": "accelerate launch --multi_gpu --num_processes {devices} train/main.py",
    "single": "accelerate launch train/main.py",
    "data_parallel": "accelerate launch train/main.py parallel.mode=data_parallel",
}
_MOST_SAMPLES = 2**24


@dataclass(frozen=True)
class Device:
    """What is computed on: `count` of them, each with so many bytes; or, `shared`, processes on one CPU and its memory."""

    name: str
    count: int
    memory: int
    usable: int
    shared: bool = False

    def room(self, devices: int) -> int:
        """Bytes that each of so many may use."""
        return self.usable // devices if self.shared else self.usable


@dataclass(frozen=True)
class Outlook:
    """Of one mode. `needs` is in bytes, by what they are for, on its fullest device."""

    name: str
    devices: int
    problem: str | None = None  # why the mode cannot be, or is not forecast; nothing of what follows is known then
    lanes: int = 0
    micro_batch: int = 0
    needs: dict[str, int] = field(default_factory=dict)
    room: int = 0  # bytes that it may use there
    fullest_stage: int | None = None  # of a pipeline, counted from 1
    largest_micro_batch: int = 0  # samples of a lane that fit, however many samples a step has
    fewest_lanes: int | None = None  # of `lanes` halved or doubled, that make it fit; None where none does

    @property
    def mode(self) -> str:
        return self.name.partition(":")[0]

    @property
    def peak(self) -> int:
        return sum(self.needs.values())

    @property
    def fits(self) -> bool:
        return self.problem is None and self.peak <= self.room

    def samples_per_second(self, timing: Timing | None, samples: int) -> float | None:
        """At most, at so many samples a step."""
        return timing.rate(samples, self.devices) if timing and self.fewest_lanes else None


def outlook(name: str, config: Config, device: Device, lines_of: Callable[[str], Sequence[Line]]) -> Outlook:
    """Of the mode that `name` stands for, as `train bench scaling --modes` takes it. `lines_of` a mode are one, or one for each
    stage of a pipeline; UsageError says why it cannot be."""
    mode, _, number = name.partition(":")
    devices = int(number or 1)
    try:
        [setup], lanes = read_modes([name], config, 0 if device.shared else max(device.count, devices), "no")
        if mode not in FORECAST:
            return Outlook(name, devices, "not forecast; train bench scaling measures it")
        lines = lines_of(mode)
    except UsageError as error:
        return Outlook(name, devices, str(error).replace(f"--modes {name}: ", ""))
    strict, room, size = config.run.determinism == "strict", device.room(devices), config.batch.size
    sharing = setup.processes if setup.mode.shares_lanes else 1
    chosen = config.model_copy(update={"parallel": setup.parallel})

    def everywhere(count: int, micro_batch: int) -> list[Counter[str]]:
        return [needs(mode, devices, count, line, micro_batch, strict=strict) for line in lines]

    def most(count: int, micro_batch: int) -> int:
        return max(map(Counter.total, everywhere(count, micro_batch)))

    def fit(count: int) -> bool:
        if sharing_problem(count, sharing, interleaved=mode == "fsdp") or config_problems(setup.mode, chosen, count):
            return False
        return most(count, size // count) <= room

    needed = everywhere(lanes, size // lanes)
    fullest = max(range(len(needed)), key=lambda place: needed[place].total())

    return Outlook(
        name=name,
        devices=devices,
        lanes=lanes,
        micro_batch=size // lanes,
        needs=dict(needed[fullest]),
        room=room,
        fullest_stage=fullest + 1 if len(needed) > 1 else None,
        largest_micro_batch=bisect_right(range(1, _MOST_SAMPLES), room, key=partial(most, lanes)),
        fewest_lanes=next((count for count in _lanes(lanes, size) if fit(count)), None),
    )


def _lanes(lanes: int, size: int) -> Iterator[int]:
    """The numbers of lanes that divide a batch and come from `lanes` by halving and doubling, the fewest first."""
    while lanes % 2 == 0:
        lanes //= 2
    while size % lanes == 0:
        yield lanes
        lanes *= 2


def advice(outlooks: Sequence[Outlook], size: int, settings: Sequence[str], precision: str) -> list[str]:
    """Which mode to take, a line each, with the command that trains what `settings` say at accelerate's `precision`."""
    if all(one.problem for one in outlooks):
        return ["take: nothing, before what is said above is mended"]
    possible = sorted((one for one in outlooks if one.fewest_lanes), key=lambda one: list(_LAUNCH).index(one.mode))
    fitting = [one for one in possible if one.fits]
    if not possible:
        return [
            "take: none fits, not even with lanes of one sample: a smaller model, an optimizer with less state, or more devices"
        ]
    best = (fitting or possible)[0]
    if not fitting:
        settings = [*(word for word in settings if not word.startswith("batch.lanes=")), f"batch.lanes={best.fewest_lanes}"]
    command = shlex.join([*_LAUNCH[best.mode].format(devices=best.devices).split(), *settings])
    if precision != "no":
        command = command.replace("launch", f"launch --mixed_precision {precision}", 1)
    if fitting:
        return [f"take: {best.name}: {command}"]
    return [
        f"take: {best.name} with batch.lanes={best.fewest_lanes}, that is {size // (best.fewest_lanes or 1)} samples a lane "
        f"instead of {best.micro_batch}: {command}",
        "The batch stays; the numbers change with the lanes.",
    ]
