"""How much of a step goes into communication, from the traces that torch.profiler has written of some steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class Communication:
    """Shares of the time of a step: in communication, and in it while nothing was computed beside it.

    Communication begins when a process or a GPU is ready for it, and so includes the wait for the others.
    """

    share: float
    exposed: float


def read(paths: Sequence[Path]) -> Communication:
    """The mean over the devices of some processes' traces: over GPUs, or over processes that compute on the CPU."""
    found = [one for path in paths for one in of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])]
    return Communication(*(sum(values) / len(found) for values in zip(*((one.share, one.exposed) for one in found), strict=True)))


def of_trace(events: Iterable[dict[str, Any]]) -> list[Communication]:
    """That of each device in the trace of a process."""
    spans = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in spans if event["name"].startswith("ProfilerStep#")]
    window = min(start for start, _ in steps), max(end for _, end in steps)
    devices: dict[Any, tuple[list[Span], list[Span]]] = {}
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    waiting = {event["tid"] for event in spans if event["name"].startswith("gloo:")}  # gloo's own threads
    for event in kernels or spans:
        communicates = _is_gpu_communication(event) if kernels else event["name"].startswith("gloo:")
        computes = not communicates if kernels else event["name"].startswith("aten::") and event["tid"] not in waiting
        if (communicates or computes) and (span := _within(_span(event), window)):
            devices.setdefault(event["pid"], ([], []))[0 if communicates else 1].append(span)
    length = window[1] - window[0]
    shares = []
    for communication, computation in devices.values():
        either, alone = _total(communication + computation), _total(computation)
        shares.append(Communication(_total(communication) / length, (either - alone) / length))
    return shares


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
