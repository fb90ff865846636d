"""How long a whole run takes: MNIST from the start of the command to the accuracy on the test pictures, ours and the peers'.

    python benchmarks/run.py FOLDER [--rounds 5] [--epochs 1] [--workers 2] [--only NAME ...] [--keep FILE]

FOLDER holds MNIST as the Hub has it. Each contestant is the command that a person types, `accelerate launch` where its
documentation says so, with the number of CPU threads that it takes by itself and the same number of data workers. Ours has a lane
for each process, since peers compute a batch in one piece, and runs with two threads and on two processes of a CPU too. Peers
(benchmarks/peers.py) open the data with `datasets`, whose cache is filled before, and decode with Pillow and torchvision; ours
streams the files and has the final checkpoint, the receipt and the evaluation of the shipped recipe. They take turns in
shuffled order; the table has the medians, and the medians of the ratios in each round. The peers are in the group `peers` of
pyproject.toml; one that is not installed is left out.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch

from train.bench.conditions import conditions

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = [sys.executable]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "-q"]
TWO = "Lockstep, two processes"
TWO_PROCESSES = ["--config_file", str(ROOT / "configs" / "accelerate" / "cpu_2.yaml")]


class Case(NamedTuple):
    """What the person has and wants."""

    folder: str
    epochs: int
    workers: int


class Turn(NamedTuple):
    seconds: float
    work: float  # seconds of CPU time of all its processes
    accuracy: float
    threads: int


class Contestant(NamedTuple):
    command: Callable[[Case, Path], list[str]]
    outcome: Callable[[str, str], tuple[float, int]]  # accuracy and CPU threads, from what it says on stdout and on stderr
    package: str = "torch"


def ours(options: list[str], processes: int, settings: list[str], case: Case, scratch: Path) -> list[str]:
    workers = case.workers // processes
    about = [f"data.path={case.folder}", f"data.workers={workers}", f"epochs={case.epochs}", f"batch.lanes={processes}"]
    script, config = ROOT / "train" / "main.py", ROOT / "configs" / "mnist.yaml"
    return [*LAUNCH, *options, str(script), str(config), *about, f"run.output_dir={scratch}", *settings]


def our_outcome(said: str, told: str) -> tuple[float, int]:
    summary = json.loads((Path(said.splitlines()[-1]) / "summary.json").read_text(encoding="utf-8"))
    threads = re.search(r"(\d+) CPU thread", told)
    assert threads
    return summary["metrics"]["validation/accuracy"], int(threads[1])


def theirs(launcher: list[str], name: str, case: Case, scratch: Path) -> list[str]:
    options = ["--epochs", str(case.epochs), "--workers", str(case.workers), "--output", str(scratch)]
    return [*launcher, str(HERE / "peers.py"), name, case.folder, *options]


def their_outcome(said: str, told: str) -> tuple[float, int]:
    facts = json.loads(said.splitlines()[-1])
    return facts["accuracy"], facts["threads"]


CONTESTANTS = {
    "Lockstep": Contestant(partial(ours, [], 1, []), our_outcome),
    "Lockstep, two threads": Contestant(partial(ours, [], 1, ["run.threads=2"]), our_outcome),
    TWO: Contestant(partial(ours, TWO_PROCESSES, 2, []), our_outcome),
    "Lockstep, fast": Contestant(partial(ours, [], 1, ["run.determinism=fast"]), our_outcome),
    "bare PyTorch loop": Contestant(partial(theirs, PYTHON, "bare"), their_outcome),
    "Accelerate's loop": Contestant(partial(theirs, LAUNCH, "accelerate"), their_outcome, "accelerate"),
    "Lightning": Contestant(partial(theirs, PYTHON, "lightning"), their_outcome, "lightning"),
    "transformers' Trainer": Contestant(partial(theirs, PYTHON, "transformers"), their_outcome, "transformers"),
    "timm": Contestant(partial(theirs, PYTHON, "timm"), their_outcome, "timm"),
}


def take_turn(contestant: Contestant, case: Case) -> Turn:
    with tempfile.TemporaryDirectory() as scratch:
        command = contestant.command(case, Path(scratch))
        before, began = os.times(), time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        seconds, after = time.perf_counter() - began, os.times()
        if ended.returncode:
            raise click.ClickException(f"{' '.join(command)}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        work = after.children_user + after.children_system - before.children_user - before.children_system
        return Turn(seconds, work, *contestant.outcome(ended.stdout, ended.stderr))


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, resolve_path=True))
@click.option("--rounds", default=5, show_default=True, help="Turns of each contestant.")
@click.option("--epochs", default=1, show_default=True, help="Epochs of a run.")
@click.option("--workers", default=2, show_default=True, help="Data workers of each contestant.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(CONTESTANTS)), help="Leave the others out, and RESULTS.md as it is."
)
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="File of the turns, to go on from.")
def main(folder: str, rounds: int, epochs: int, workers: int, only: tuple[str, ...], keep: Path | None) -> None:
    names = [name for name in CONTESTANTS if name in (only or CONTESTANTS)]
    if torch.cuda.is_available() and TWO in names:
        names.remove(TWO)
    for name in [name for name in names if find_spec(CONTESTANTS[name].package) is None]:
        click.echo(f"{name}: left out, {CONTESTANTS[name].package} is not installed (pip install --group peers)", err=True)
        names.remove(name)
    case = Case(folder, epochs, workers)
    fill_cache(folder)
    turns = kept(keep, names)
    for number in range(rounds):
        order = random.Random(number).sample(names, len(names))
        for name in [name for name in order if len(turns[name]) <= number]:
            turn = take_turn(CONTESTANTS[name], case)
            turns[name].append(turn)
            click.echo(f"round {number + 1}/{rounds}: {name} {turn.seconds:.1f} s, accuracy {turn.accuracy:.4f}", err=True)
            if keep:
                keep.write_text(json.dumps(turns), encoding="utf-8")
    packages = sorted({CONTESTANTS[name].package for name in names} | {"torch", "torchvision", "accelerate", "datasets"})
    known = conditions(["0"] if torch.cuda.is_available() else [])
    about = [
        f"- `python benchmarks/run.py FOLDER --rounds {rounds} --epochs {epochs} --workers {workers}`, medians of the rounds",
        "- MNIST, `configs/mnist.yaml`: from the start of the command to the accuracy on 10,000 test pictures, a checkpoint kept",
        f"- {known['devices']}; data workers: {workers} each; CPU threads: what each takes by itself",
        f"- {known['software'].partition(',')[0]}, {', '.join(f'{name} {version(name)}' for name in packages)}",
    ]
    text = "\n".join([*about, "", compared(turns)])
    click.echo(text)
    if not only:
        results.record("Whole run", text)


def kept(file: Path | None, names: list[str]) -> dict[str, list[Turn]]:
    """The turns that an earlier call has taken."""
    found = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {}
    return {name: [Turn(*turn) for turn in found.get(name, [])] for name in names}


def fill_cache(folder: str) -> None:
    from datasets import load_dataset

    load_dataset(folder)


def compared(turns: dict[str, list[Turn]]) -> str:
    """A table of the medians, each beside the first contestant."""
    first = next(iter(turns))
    rows = []
    for name in sorted(turns, key=lambda name: statistics.median(turn.seconds for turn in turns[name])):
        seconds = [turn.seconds for turn in turns[name]]
        ratios = [turn.seconds / one.seconds for turn, one in zip(turns[name], turns[first], strict=True)]
        rows.append(
            [
                name,
                results.spread(seconds, "{:.1f}"),
                results.spread(ratios, "{:.2f}"),
                f"{statistics.median(turn.work for turn in turns[name]):.1f}",
                str(turns[name][0].threads),
                f"{statistics.median(turn.accuracy for turn in turns[name]):.2%}",
            ]
        )
    header = ["contestant", "seconds", f"times {first}", "CPU seconds", "threads of a process", "accuracy"]
    return results.table(header, rows)


if __name__ == "__main__":
    main()
