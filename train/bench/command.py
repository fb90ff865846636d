"""`train bench ...`: the command lines of the measurements."""

from __future__ import annotations

from pathlib import Path

import click

from train.verb import Verb


@click.group()
def bench() -> None:
    """Measure how fast a configuration trains here."""


@bench.command(cls=Verb)
@click.argument("settings", nargs=-1, metavar="[CONFIG.yaml ...] [key=value ...]")
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
