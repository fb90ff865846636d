"""How fast pictures come to the model here, beside other loaders and the bare decoding of the same files.

    python benchmarks/input.py FOLDER [--decoders] [--workers 2] [--rounds 5] [--seconds 3]

FOLDER holds pictures in class folders. Each contestant hands over batches of 64 float pictures (3, 224, 224), cropped at random,
flipped at random and normalised, on the device, without end, with the same number of worker processes and one CPU thread in each.
They read what they are made for: the folder, or Parquet or tar shards of the same bytes, which are in the cache of the disk. They
take turns in shuffled order, each in a process of its own, that is stopped before the next begins; the start of the workers and
the first second, in which the queues fill and empty, are left out. All have the environment that `train/main.py` sets.

"Only decoding" is a limit and no loader: its workers keep nothing; --decoders compares decoders in that way. CPU time is that of
all processes of a contestant; where the CPUs are all that it waits for, it tells the same as the rate, and is not disturbed as
much by what else the machine does. The other loaders are in the group `peers` of pyproject.toml; one that is not installed is
left out.
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
from loaders import BATCH, DECODERS, LOADERS, SIZE, Batches, Files, device, pictures_of, write_shards
from PIL import Image

from train import determinism
from train.bench.conditions import conditions
from train.config.schema import Run
from train.stopping import ask_for_signal_when_parent_dies

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
    ask_for_signal_when_parent_dies(signal.SIGKILL)
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
@click.option("--seconds", default=3.0, show_default=True, help="Measured seconds of a turn.")
@click.option("--decoders", is_flag=True, help="Compare decoders alone instead of loaders.")
def main(folder: Path, workers: int, rounds: int, seconds: float, decoders: bool) -> None:
    torch.set_num_threads(1)
    contestants = dict(DECODERS if decoders else LOADERS)
    for name in [name for name, its in contestants.items() if find_spec(its.module) is None]:
        click.echo(f"{name}: left out, {contestants[name].package} is not installed (pip install --group peers)", err=True)
        del contestants[name]
    names = list(contestants)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        files = write_shards(folder, Path(scratch))
        order = random.Random(0)
        for number in range(rounds):
            for name in order.sample(names, len(names)):
                turn = take_turn(contestants[name].make, files, workers, seconds)
                turns[name].append(turn)
                click.echo(f"round {number + 1}/{rounds}: {name} {turn.rate:.0f} pictures/s, {told(turn.work)} ms", err=True)
    packages = {its.package for its in contestants.values()} | {"accelerate", "datasets", "pyarrow"}
    options = f"{'--decoders ' * decoders}--workers {workers} --rounds {rounds} --seconds {seconds:g}"
    about = circumstances(f"python benchmarks/input.py FOLDER {options}", folder, sorted(packages))
    text = f"{about}\n\n{compared(turns)}"
    click.echo(text)
    results.record("Decoders" if decoders else "Input", text)


def told(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def ratios(one: list[float], other: list[float]) -> str:
    """The median of the rounds' ratios, and the range."""
    found = [mine / its for mine, its in zip(one, other, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def compared(turns: dict[str, list[Turn]]) -> str:
    """A table of the medians, each beside the first contestant."""
    first = next(iter(turns))
    rates = {name: [turn.rate for turn in own] for name, own in turns.items()}
    work = {name: [turn.work for turn in own] for name, own in turns.items()}
    rows = [
        [
            name,
            f"{statistics.median(rates[name]):.0f}",
            f"{min(rates[name]):.0f} to {max(rates[name]):.0f}",
            told(statistics.median(work[name])),
            ratios(rates[first], rates[name]),
            ratios(work[name], work[first]),
        ]
        for name in sorted(turns, key=lambda name: statistics.median(work[name]))
    ]
    header = ["contestant", "pictures/s", "range", "CPU ms a picture", f"rate of {first} / its", f"its CPU time / {first}'s"]
    return results.table(header, rows)


def circumstances(command: str, folder: Path, packages: list[str]) -> str:
    known = conditions(["0"] if torch.cuda.is_available() else [])
    lines = [
        f"- `{command}`, medians of the rounds; batches of {BATCH} float pictures of {SIZE} x {SIZE} on {device().type}",
        f"- {known['devices']}, one thread in each process",
        f"- {known['software'].partition(',')[0]}, {', '.join(f'{name} {version(name)}' for name in packages)}",
        f"- {sizes(folder)}",
    ]
    return "\n".join(lines)


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
