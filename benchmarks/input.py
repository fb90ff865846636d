"""How fast pictures come to the model here, beside other loaders and the bare decoding of the same files.

    python benchmarks/input.py FOLDER [--workers 2] [--rounds 5] [--seconds 4]

FOLDER holds pictures in class folders. Each contestant hands over batches of 64 float pictures (3, 224, 224), cropped at random,
flipped at random and normalised, on the device, without end, with the same number of worker processes and one CPU thread in each.
They read what they are made for: the folder, or Parquet or tar shards of the same bytes, which are in the cache of the disk. They
take turns in shuffled order, each in a process of its own, that is stopped before the next begins; the start of the workers and
the first second, in which the queues fill and empty, are left out. All have the environment that `train/main.py` sets.

"Only decoding" is a limit and no loader: its workers keep nothing. CPU time is that of all processes of a contestant; where the
CPUs are all that it waits for, it tells the same as the rate, and is not disturbed as much by what else the machine does. The
other loaders are in the group `peers` of pyproject.toml; one that is not installed is left out.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import psutil
import results
import torch
from loaders import BATCH, CONTESTANTS, OURS, SIZE, Batches, Files, device, pictures_of, write_shards
from PIL import Image

from train import determinism
from train.bench.conditions import conditions
from train.config.schema import Run

HEADING = "Input"
WARM_SECONDS = 1.0


class Turn(NamedTuple):
    rate: float  # pictures a second
    work: float  # seconds of CPU time a picture


def take_turn(make: Callable[[Files, int], Batches], files: Files, workers: int, seconds: float) -> Turn:
    """A stretch of `seconds`, measured in a process that is ended with all that it has started."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_turn, args=(make, files, workers, seconds, sender))
    process.start()
    sender.close()
    try:
        turn: Turn = receiver.recv()
    except EOFError:
        raise click.ClickException("a contestant has failed; what it says is above") from None
    finally:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return turn


def _turn(make: Callable[[Files, int], Batches], files: Files, workers: int, seconds: float, sender: Connection) -> None:
    os.setsid()
    determinism.prepare_environment(Run())
    batches = make(files, workers)
    next(batches)
    for _ in until(WARM_SECONDS, batches):
        pass
    began, worked = time.perf_counter(), cpu_seconds()
    count = sum(until(seconds, batches))
    sender.send(Turn(count / (time.perf_counter() - began), (cpu_seconds() - worked) / count))
    signal.pause()


def cpu_seconds() -> float:
    """Of this process and of those that it has started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


def until(seconds: float, batches: Batches) -> Batches:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield next(batches)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--workers", default=2, show_default=True, help="Worker processes of each contestant.")
@click.option("--rounds", default=5, show_default=True, help="Turns of each contestant.")
@click.option("--seconds", default=4.0, show_default=True, help="Measured seconds of a turn.")
@click.option("--only", multiple=True, help="A contestant by its name; RESULTS.md is left as it is.")
def main(folder: Path, workers: int, rounds: int, seconds: float, only: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    names = [name for name in CONTESTANTS if not only or name in only]
    for name in [name for name in names if find_spec(CONTESTANTS[name].module) is None]:
        click.echo(f"{name}: left out, as {CONTESTANTS[name].package} is not installed (pip install --group peers)", err=True)
        names.remove(name)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        files = write_shards(folder, Path(scratch))
        order = random.Random(0)
        for number in range(rounds):
            for name in order.sample(names, len(names)):
                turn = take_turn(CONTESTANTS[name].make, files, workers, seconds)
                turns[name].append(turn)
                click.echo(f"round {number + 1}/{rounds}: {name} {turn.rate:.0f} pictures/s, {told(turn.work)} ms", err=True)
    text = report(turns, folder, workers, seconds)
    click.echo(text)
    if not only:
        results.record(HEADING, text)


def told(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def compared(ours: list[float], other: list[float]) -> str:
    """The median of the rounds' ratios, and the range."""
    ratios = [one / two for one, two in zip(ours, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def report(turns: dict[str, list[Turn]], folder: Path, workers: int, seconds: float) -> str:
    rates = {name: [turn.rate for turn in own] for name, own in turns.items()}
    work = {name: [turn.work for turn in own] for name, own in turns.items()}
    header = ["contestant", "pictures/s", "range", "CPU ms a picture"]
    if OURS in turns:
        header += [f"rate of {OURS} / its", f"its CPU time / {OURS}'s"]
    rows = []
    for name in sorted(turns, key=lambda name: statistics.median(work[name])):
        own = rates[name]
        row = [name, f"{statistics.median(own):.0f}", f"{min(own):.0f} to {max(own):.0f}", told(statistics.median(work[name]))]
        rows.append(row + ([compared(rates[OURS], own), compared(work[name], work[OURS])] if OURS in turns else []))
    packages = sorted({CONTESTANTS[name].package for name in turns} | {"accelerate", "datasets", "pyarrow"})
    known = conditions(["0"] if torch.cuda.is_available() else [])
    rounds = len(next(iter(turns.values())))
    lines = [
        f"`python benchmarks/input.py FOLDER --workers {workers} --rounds {rounds} --seconds {seconds:g}`: medians of {rounds} "
        f"turns of {seconds:g} s in shuffled order; {workers} workers, one CPU thread in each process; batches of {BATCH} float "
        f"pictures of {SIZE} x {SIZE} on {device().type}.",
        f"- {known['devices']}",
        f"- {known['software'].partition(',')[0]}, {', '.join(f'{name} {version(name)}' for name in packages)}",
        f"- {sizes(folder)}",
    ]
    return "\n".join([lines[0], "", *lines[1:], "", results.table(header, rows)])


def sizes(folder: Path) -> str:
    pictures = pictures_of(folder)
    kinds: Counter[tuple[int, int]] = Counter()
    for path in pictures:
        with Image.open(path) as picture:
            kinds[picture.size] += 1
    pixels = statistics.median(width * height for width, height in kinds.elements())
    common = ", ".join(f"{width} x {height} ({count})" for (width, height), count in kinds.most_common(3))
    mean = statistics.mean(path.stat().st_size for path in pictures)
    return (
        f"{len(pictures)} JPEG pictures, {pixels / 1e6:.2f} megapixels (median), {mean / 1000:.0f} kB (mean); most often {common}"
    )


if __name__ == "__main__":
    main()
