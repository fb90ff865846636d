"""The losses of two runs, and where they part."""

from __future__ import annotations

from pathlib import Path

from train.errors import UsageError
from train.receipt.compare import Parting, trace
from train.receipt.document import Receipt


def draw(first: Receipt, second: Receipt, parting: Parting | None, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'lockstep[plot]'") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for receipt, style in ((first, "-"), (second, "--")):
        steps = trace(receipt)
        axes.plot(list(steps), [float(numbers["loss"]) for numbers in steps.values()], style, label=receipt["run"])
    if parting:
        axes.axvline(parting.step, color="tab:red", linewidth=1, label=f"{parting.what} part at step {parting.step}")
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend()
    figure.savefig(path)
