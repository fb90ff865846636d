"""What `train plan` has found, as a table for people and as numbers for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from train.bench import tables
from train.doctor.findings import gibibytes
from train.job import Job
from train.plan.outlook import Device, Outlook, advice
from train.plan.timing import Timing
from train.plan.trace import Trace

NOTES = (
    "Memory is that of the tensors on the fullest device when they are most, from a step that was traced without memory. Of a "
    "GPU 90 % count as usable; on a CPU the processes share what is free, and Python and the data workers come on top.",
    "Samples/s are those of one device times the devices, data at hand and no time lost to communication: at most. "
    "`train bench scaling` measures it. Hours and cost are of the whole config at this rate, without evaluation and checkpoints.",
)
KINDS = ("weights", "gradients", "partial sums", "optimizer state", "averaged weights", "activations", "communication")
_ROWS = (
    "lanes a step", "fullest stage", *KINDS, "peak", "of usable memory", "fits", "largest lane", "fewest batch.lanes",
    "samples/s, at most", "whole config", "cost",
)  # fmt: skip


@dataclass(frozen=True)
class Results:
    job: Job
    device: Device
    trace: Trace
    outlooks: Sequence[Outlook]
    timing: Timing | None
    settings: Sequence[str]  # as they were given
    precision: str
    price: float | None  # of a device for an hour

    def advice(self) -> list[str]:
        return advice(self.outlooks, self.job.config.batch.size, self.settings, self.precision)

    def speed(self, one: Outlook) -> dict[str, float | None]:
        """Of the whole run in a mode; None where it is not known."""
        size = self.job.config.batch.size
        rate = one.samples_per_second(self.timing, size)
        hours = self.job.total_steps * size / rate / 3600 if rate else None
        cost = hours * one.devices * self.price if hours is not None and self.price is not None else None
        return {"samples_per_second": rate, "hours": hours, "cost": cost}

    def remarks(self) -> list[str]:
        job, device = self.job, self.device
        memory = f"{gibibytes(device.memory)} {'free' if device.shared else 'each'}"
        on = job.accelerator.device.type
        lines = [line for line in job.describe() if line.startswith(("model: ", "batch: ", "length: "))]
        lines.append(f"device: {device.count} x {device.name}" if not device.shared else f"device: {device.name}")
        lines[-1] += f", {memory}; traced with the kernels of {on}, precision {job.accelerator.mixed_precision}"
        if self.trace.host:
            lines.append(f"host: each process keeps {_amount(self.trace.host)} of optimizer state in the host's memory")
        if seeds := len(job.config.seeds):
            lines.append(f"seeds: all numbers are of one run; {seeds} at the same time take at most {seeds} times the memory")
        lines += [f"{one.name}: {line}" for one in self.outlooks if one.problem for line in one.problem.splitlines()]
        if self.timing:
            lines.append(_timed(self.timing))
        return lines + self.advice()

    def facts(self) -> dict[str, Any]:
        """Everything, for scripts; memory in bytes."""
        job = self.job
        return {
            "model": job.config.model.name,
            "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
            "precision": job.accelerator.mixed_precision,
            "device": asdict(self.device),
            "host": self.trace.host,
            "batch": job.config.batch.size,
            "steps": job.total_steps,
            "timing": asdict(self.timing) if self.timing else None,
            "modes": [asdict(one) | {"peak": one.peak, "fits": one.fits} | self.speed(one) for one in self.outlooks],
            "advice": self.advice(),
        }


def _amount(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _timed(timing: Timing) -> str:
    peak = f"; {_amount(timing.peak)} at most" if timing.peak else ""
    return f"timed: {timing.lane:.3g} s a lane of {timing.micro_batch}, {timing.update:.3g} s an update{peak}"


def show(results: Results) -> None:
    tables.show(_table(results), (*results.remarks(), *NOTES))


def _table(results: Results) -> Table:
    """A column a mode."""
    made = Table("", box=box.SIMPLE)
    for one in results.outlooks:
        made.add_column(one.name, overflow="fold")
    columns = [_column(results, one) for one in results.outlooks]
    names = {name for column in columns for name in column}
    for name in (row for row in _ROWS if row in names):
        made.add_row(name, *(column.get(name, "-") for column in columns))
    return made


def _column(results: Results, one: Outlook) -> dict[str, str]:
    if one.problem:
        return {"fits": "cannot be"}
    speed = results.speed(one)
    column = {"lanes a step": f"{one.lanes} x {one.micro_batch}"}
    if one.fullest_stage:
        column["fullest stage"] = f"{one.fullest_stage} of {one.devices}"
    column |= {kind: _amount(one.needs[kind]) for kind in KINDS if one.needs.get(kind)}
    column |= {
        "peak": _amount(one.peak),
        "of usable memory": f"{one.peak / one.room:.0%}",
        "fits": "yes" if one.fits else "no",
        "largest lane": f"{one.largest_micro_batch} samples",
        "fewest batch.lanes": "none" if one.fewest_lanes is None else str(one.fewest_lanes),
    }
    if results.timing:
        column["samples/s, at most"] = "-" if speed["samples_per_second"] is None else f"{speed['samples_per_second']:,.1f}"
        column["whole config"] = "-" if speed["hours"] is None else f"{speed['hours']:.3g} hours"
    if speed["cost"] is not None:
        column["cost"] = f"{speed['cost']:,.2f}"
    return column
