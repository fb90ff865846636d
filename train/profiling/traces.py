"""What the time of a step goes into, from the traces that torch.profiler has written of some steps. Times are microseconds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.profiling.labels import PREFIX

_STEP = "ProfilerStep#"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]
Span = tuple[float, float]

# The parts of a step as they are shown; where two are labelled at a time, the one that is named first here is in the other.
PARTS = ("forward", "backward", "forward and backward", "optimizer", "input wait", "logging", "saving", "evaluation")


@dataclass(frozen=True)
class Communication:
    """Shares of the time of a step: in communication, and in it while nothing was computed beside it.

    Communication begins when a process or a GPU is ready for it, and so includes the wait for the others.
    """

    share: float
    exposed: float


def read(paths: Sequence[Path]) -> Communication:
    """The mean over the devices of some processes' traces: over GPUs, or over processes that compute on the CPU."""
    found = [one for path in paths for one in of_trace(events(path))]
    return Communication(*(sum(values) / len(found) for values in zip(*((one.share, one.exposed) for one in found), strict=True)))


def events(path: Path) -> list[Event]:
    """What a trace tells that has a duration."""
    return [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event.get("ph") == "X"]


def step_count(spans: Iterable[Event]) -> int:
    return sum(event["name"].startswith(_STEP) for event in spans)


def of_trace(spans: Sequence[Event]) -> list[Communication]:
    """That of each device in the trace of a process."""
    window = _window(spans)
    devices: dict[Any, tuple[list[Span], list[Span]]] = {}
    for event, communicates in _work(spans):
        if span := _within(_span(event), window):
            devices.setdefault(event["pid"], ([], []))[0 if communicates else 1].append(span)
    length = window[1] - window[0]
    shares = []
    for communication, computation in devices.values():
        either, alone = _total(communication + computation), _total(computation)
        shares.append(Communication(_total(communication) / length, (either - alone) / length))
    return shares


def parts(spans: Sequence[Event]) -> dict[str, float]:
    """The time of a step in each of its parts, which add up to the step.

    On a GPU that is the part that has launched what it computes; where it computes nothing, communication, else what the process
    is at meanwhile. On a CPU it is what the process is at, unless it communicates and computes nothing.
    """
    window = _window(spans)
    thread = next(event["tid"] for event in spans if event["name"].startswith(_STEP))
    labels = sorted((_span(event), event["name"].removeprefix(PREFIX)) for event in spans if _is_label(event, thread))
    launched = {event["args"]["correlation"]: event["ts"] for event in spans if "runtime" in event.get("cat", "")}
    work: list[tuple[Span, Any]] = list(labels)
    for event, communicates in _work(spans):
        if communicates or event["cat"] not in _KERNELS:
            work.append((_span(event), "communication" if communicates else "computing"))
        else:
            work.append((_span(event), ("kernel", _label_at(launched.get(event["args"].get("correlation"), 0.0), labels))))
    times: dict[str, float] = defaultdict(float)
    active: Counter[Any] = Counter()
    reached = window[0]
    changes = [
        change for span, what in work if (own := _within(span, window)) for change in ((own[0], 1, what), (own[1], -1, what))
    ]
    for time, change, what in [*sorted(changes, key=lambda one: one[0]), (window[1], 0, "")]:
        times[_part(active)] += time - reached
        active[what] += change
        reached = time
    return {part: times[part] / step_count(spans) for part in (*PARTS, "communication", "other") if times[part]}


def _part(active: Mapping[Any, int]) -> str:
    """What a moment belongs to, by how much of each kind is under way."""
    for part in (*PARTS, "other"):
        if active["kernel", part]:
            return part
    if active["communication"] and not active["computing"]:
        return "communication"
    return next((part for part in PARTS if active[part]), "other")


def _label_at(time: float, labels: Sequence[tuple[Span, str]]) -> str:
    """The part that the process was at; `labels` are in the order of their starts."""
    place = bisect_right(labels, time, key=lambda label: label[0][0])
    return next((part for (_, end), part in reversed(labels[max(0, place - len(PARTS)) : place]) if time < end), "other")


def _is_label(event: Event, thread: int) -> bool:
    return bool(event["tid"] == thread and event["name"].startswith(PREFIX) and event["cat"] == "user_annotation")


def _work(spans: Sequence[Event]) -> Iterator[tuple[Event, bool]]:
    """What the devices are at, kernels or, where there are none, operators of the CPU, and whether they communicate."""
    kernels = [event for event in spans if event.get("cat") in _KERNELS]
    waiting = {event["tid"] for event in spans if event["name"].startswith("gloo:")}  # gloo's own threads
    for event in kernels or spans:
        communicates = _is_gpu_communication(event) if kernels else event["name"].startswith("gloo:")
        computes = not communicates if kernels else event["name"].startswith("aten::") and event["tid"] not in waiting
        if communicates or computes:
            yield event, communicates


def _window(spans: Iterable[Event]) -> Span:
    """From the start of the first step to the end of the last one."""
    steps = [_span(event) for event in spans if event["name"].startswith(_STEP)]
    return min(start for start, _ in steps), max(end for _, end in steps)


def _is_gpu_communication(event: dict[str, Any]) -> bool:
    return "nccl" in event["name"].lower() or "PtoP" in event["name"]  # PtoP: a copy from one GPU to another


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _within(span: Span, window: Span) -> Span | None:
    start, end = max(span[0], window[0]), min(span[1], window[1])
    return (start, end) if start < end else None


def _total(spans: Iterable[Span]) -> float:
    """The time that is covered by any of them."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
