"""The losses of two runs, and where they part."""

from __future__ import annotations

from pathlib import Path

from train.drawing import axes_of
from train.receipt.compare import Parting, trace
from train.receipt.document import Receipt


def draw(first: Receipt, second: Receipt, parting: Parting | None, path: Path) -> None:
    with axes_of(path) as axes:
        for receipt, style in ((first, "-"), (second, "--")):
            steps = trace(receipt)
            axes.plot(list(steps), [float(numbers["loss"]) for numbers in steps.values()], style, label=receipt["run"])
        if parting:
            axes.axvline(parting.step, color="tab:red", linewidth=1, label=f"{parting.what} part at step {parting.step}")
        axes.set(xlabel="step", ylabel="training loss", yscale="log")
        axes.legend()
