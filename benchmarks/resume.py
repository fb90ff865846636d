"""Whether a resume takes longer the further a run has come.

    python benchmarks/resume.py [--rounds 5]

The first table is the time from the start of the process to its first step after a resume, of the same small run from a
checkpoint that says it stands at another position; the positions take turns, and the times are medians. The second is the time
to find the samples of one batch in a data set of ImageNet's size.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from train import checkpoint
from train.data.order import map_order

SCRIPT = Path(__file__).parent.parent / "train" / "main.py"
BATCH = 10
NEAR, FAR = 100, 10_000_000
KINDS = {"taken in any order": "data.streaming=false", "streamed": "data.streaming=true"}
IMAGENET = 1_281_167


def command(outputs: Path, kind: str, position: int) -> list[str]:
    settings = (f"run.output_dir={outputs}", f"run.name={position}", KINDS[kind], f"batch.size={BATCH}", "batch.lanes=1")
    return [
        sys.executable,
        str(SCRIPT),
        *settings,
        "schedule.name=constant",
        "data.workers=0",
        "evaluate.every=0",
        "tracking.every=1",
    ]


def stand_at(outputs: Path, kind: str, position: int) -> None:
    """Make a run's folder with a checkpoint of the position as its only one."""
    run = [*command(outputs, kind, position), "steps=1", "checkpoint.every=1"]
    folder = Path(subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()) / "checkpoints"
    found, _ = checkpoint.latest(folder)
    assert found is not None
    snapshot = checkpoint.read(found)
    step = position // BATCH
    checkpoint.write(folder, replace(snapshot, step=step, state={**snapshot.state, "position": position}))
    checkpoint.prune(folder, step, keep=1, best=None)


def seconds_to_first_step(outputs: Path, kind: str, position: int) -> float:
    step = position // BATCH + 1
    run = [*command(outputs, kind, position), f"steps={step}", "checkpoint.every=0"]
    begun = time.perf_counter()
    with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith(f"step {step}/"):
                return time.perf_counter() - begun
    raise SystemExit("".join(said))


def batch_microseconds(position: int) -> float:
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        map_order(np.arange(position, position + 256), IMAGENET, 0, shuffle=True)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
def main(rounds: int) -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        places = [(kind, position) for kind in KINDS for position in (NEAR, FAR)]
        for kind, position in places:
            stand_at(Path(folder) / kind, kind, position)
        seconds: dict[tuple[str, int], list[float]] = {place: [] for place in places}
        for _ in range(rounds):
            for kind, position in places:
                seconds[kind, position].append(seconds_to_first_step(Path(folder) / kind, kind, position))
    table = Table("data", "position", "start to first step, s", f"of position {NEAR}", title="Resume")
    for (kind, position), times in seconds.items():
        median = statistics.median(times)
        table.add_row(kind, f"{position:,}", f"{median:.2f}", f"{median / statistics.median(seconds[kind, NEAR]):.3f}")
    console.print(table)
    table = Table("position", "µs", title=f"Order of a batch of 256 among {IMAGENET:,} samples")
    for position in (NEAR, FAR, 10**12):
        table.add_row(f"{position:,}", f"{batch_microseconds(position):.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
