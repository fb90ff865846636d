"""`train bench ...`: the command lines of the measurements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from train.verb import Verb


@click.group()
def bench() -> None:
    """Measure how fast a configuration trains here."""


_settings = click.argument("settings", nargs=-1, metavar="[CONFIG.yaml ...] [key=value ...]")
_rounds = click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns of each.")
_steps = click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Measured steps of a turn.")
_json = click.option("--json", "as_json", is_flag=True, help="All numbers as one JSON object.")


def _counts(context: click.Context, option: click.Parameter, text: str | None) -> list[int]:
    words = text.split(",") if text else []
    if not all(word.isdecimal() for word in words):
        raise click.BadParameter("write numbers of workers, such as 0,1,4")
    return sorted({int(word) for word in words})


@bench.command("input", cls=Verb)
@_settings
@click.option("--workers", callback=_counts, metavar="N,...", help="Numbers of data workers; by default up to the cores.")
@_rounds
@_steps
@_json
def input_(settings: tuple[str, ...], workers: list[int], rounds: int, steps: int, as_json: bool) -> None:
    """Does the data keep up? Read and decode the configuration's own, without training, with 0, 1, 2, ... workers.

    Beside it a step on this device is measured, and the wait that each number of workers would cause in it.

    \b
    train bench input configs/cifar10.yaml
    train bench input configs/cifar10.yaml data.path=/pictures --workers 2,4,8
    """
    from train.bench.feed import measure

    measure(settings, workers=workers, rounds=rounds, steps=steps, as_json=as_json)


@bench.command(cls=Verb)
@_settings
@click.option(
    "--with",
    "variants",
    multiple=True,
    metavar="'KEY=VALUE ...'",
    help="Settings over the configuration, as another one that takes turns with it; again for more. By default the other level "
    "of run.determinism.",
)
@_rounds
@_steps
@_json
def step(settings: tuple[str, ...], variants: tuple[str, ...], rounds: int, steps: int, as_json: bool) -> None:
    """What does a step cost? Train on this device with data in memory, with input, and with logging, in turns.

    Also says how much memory it takes, and what other settings (--with) change in time and memory.

    \b
    train bench step configs/cifar10.yaml
    train bench step configs/cifar10.yaml batch.lanes=1 speed.precision=bf16 --json
    train bench step configs/cifar10.yaml --with speed.channels_last=true --with 'speed.precision=bf16 speed.compile=model'
    """
    from train.bench.step import measure

    measure(settings, variants=variants, rounds=rounds, steps=steps, as_json=as_json)


@bench.command("all", cls=Verb)
@_settings
@_rounds
def all_(settings: tuple[str, ...], rounds: int) -> None:
    """Measure input, step and scaling one after the other, each in a process of its own."""
    for name in ("input", "step", "scaling"):
        print(f"bench {name}", file=sys.stderr, flush=True)
        words = [*settings, "--rounds", str(rounds)]
        if code := subprocess.run([sys.executable, "-m", "train", "bench", name, *words]).returncode:
            sys.exit(code)


@bench.command(cls=Verb)
@_settings
@click.option(
    "--modes",
    metavar="MODE,...",
    help="What to compare, the first being the measure of the others: single, ddp:N, fsdp:N, pipeline:N, tensor:N and "
    "data_parallel:N on N devices, or accelerate config files. By default one device and all GPUs, or one and two CPU processes.",
)
@click.option("--precision", type=click.Choice(["no", "bf16", "fp16"]), default="no", help="Of the modes that are no files.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Turns of each mode.")
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True, help="Measured steps of a turn.")
@click.option("--warmup", type=click.IntRange(1), default=10, show_default=True, help="Steps of a turn before these.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the results; by default a new one in run.output_dir.")
def scaling(
    settings: tuple[str, ...],
    modes: str | None,
    precision: str,
    rounds: int,
    steps: int,
    warmup: int,
    output: Path | None,
) -> None:
    """Is the second device worth it, and in which mode? Train the same configuration in several modes and compare.

    The modes take turns, each turn being a launch of train/main.py as a person makes it, without evaluation and checkpoints.
    The folder gets scaling.md (the table), scaling.svg (the plot) and scaling.json (all numbers).

    \b
    train bench scaling configs/cifar10.yaml
    train bench scaling configs/cifar10.yaml --modes single,ddp:2,data_parallel:2 --precision bf16
    train bench scaling configs/cifar10.yaml batch.size=512 --modes configs/accelerate/single_gpu.yaml,my_accelerate.yaml
    """
    from train.bench.scaling import Plan, measure

    measure(Plan(settings, modes, precision, rounds, steps, warmup, output))
