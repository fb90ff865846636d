"""How fast memory is copied and matrices are multiplied here, beside the figures that the card's maker publishes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from train.doctor import gpu
from train.doctor.cards import Card, published
from train.doctor.findings import Finding, broken, ok

_ROUNDS = 5
_SECONDS = 0.2  # of a round, so that clocks have risen and a launch costs nothing
_LOW = 0.35  # of the published figure; 0.6 to 0.95 is usual, and cards of 70 W reach half
_SLOW = "another program may use the card, or it may be too hot or short of power: nvidia-smi -q -d PERFORMANCE"
_FAILED = "another program may hold the memory that it needs; nvidia-smi shows it"


def speed() -> list[Finding]:
    usable = [number for number, found in enumerate(gpu.cards()) if found.state != "failed"] if torch.cuda.is_available() else []
    lines = [] if usable else device_speed(torch.device("cpu"), "CPU", None)
    for number in usable:
        device = torch.device("cuda", number)
        lines += device_speed(device, f"GPU {number}", published(torch.cuda.get_device_name(number)))
        lines.append(_beside(f"GPU {number} from host", partial(from_host, device), "B/s", None))
    return lines


def device_speed(device: torch.device, name: str, card: Card | None) -> list[Finding]:
    """Bytes copied and products computed a second by one device."""
    lines = [_beside(f"{name} copy", partial(copy_rate, device), "B/s", card.memory * 1e9 if card else None)]
    with _strict_matmul():
        for precision in ("fp32", "tf32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16"):
            figure = getattr(card, precision) if card else None
            if card is None or figure is not None:  # else the card has no such units
                rate = partial(matmul_rate, device, precision)
                lines.append(_beside(f"{name} {precision}", rate, "FLOP/s", figure and figure * 1e12))
    return lines


def _beside(subject: str, measure: Callable[[], float], unit: str, figure: float | None) -> Finding:
    try:
        measured = measure()
    except RuntimeError as error:
        return broken(subject, error, _FAILED)
    text = _amount(measured, unit)
    if figure is None:
        return ok(subject, text)
    share = measured / figure
    text += f", {share:.0%} of the {_amount(figure, unit)} published"
    return Finding(subject, "warning", text, _SLOW) if share < _LOW else ok(subject, text)


def _amount(number: float, unit: str) -> str:
    return f"{number / 1e12:.4g} T{unit}" if number >= 1e12 else f"{number / 1e9:.4g} G{unit}"


def copy_rate(device: torch.device) -> float:
    """Bytes a second that are read and written by a copy within the device's memory."""
    size = 2**30 if device.type == "cuda" else 2**27  # several times any cache
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def from_host(device: torch.device) -> float:
    """Bytes a second from page-locked host memory to the device."""
    source = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    return source.numel() / _seconds(lambda: target.copy_(source, non_blocking=True), device)


def matmul_rate(device: torch.device, precision: str) -> float:
    """Floating-point operations a second of a product of two square matrices of random numbers.

    Random, since a chip draws less power and runs faster on zeros.
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    side = 8192 if device.type == "cuda" else 512
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, dtype=dtype, device=device)
    return 2 * side**3 / _seconds(lambda: torch.matmul(left, right, out=out), device)


@contextmanager
def _strict_matmul() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median of some rounds, each as many calls as fill it."""

    def round_of(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    round_of(1)  # the first call sets up
    calls = max(1, int(_SECONDS / round_of(1)))
    return statistics.median(round_of(calls) for _ in range(_ROUNDS))
