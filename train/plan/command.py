"""`train plan`: its command line."""

from __future__ import annotations

import click

from train.verb import Verb


@click.command(cls=Verb)
@click.argument("settings", nargs=-1, metavar="[CONFIG.yaml ...] [key=value ...]")
@click.option("--memory", type=click.FloatRange(0, min_open=True), metavar="GIB", help="Of a card that is not here.")
@click.option("--devices", type=click.IntRange(1), help="How many there are; by default all GPUs, or the CPU for two processes.")
@click.option("--precision", type=click.Choice(["no", "bf16", "fp16"]), default="no", help="As accelerate config would say.")
@click.option("--price", type=click.FloatRange(0), metavar="PER_HOUR", help="Of one device, to say what the run costs.")
@click.option("--quick", is_flag=True, help="Run nothing: only what the memory is expected to be.")
@click.option("--json", "as_json", is_flag=True, help="All numbers as one JSON object, for scripts.")
def plan(
    settings: tuple[str, ...],
    memory: float | None,
    devices: int | None,
    precision: str,
    price: float | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Does the run fit, in which mode, how long will it take, and what does it cost? Nothing is trained.

    One step is made with tensors that take no memory, and what they would take is counted, for each mode. Then some steps are
    made on the device that is here and timed; where its memory does not suffice, with half of a lane's samples, and so on.
    With --memory nothing is timed.

    \b
    train plan configs/imagenet_resnet50.yaml
    train plan configs/imagenet_resnet50.yaml batch.size=256 --memory 24 --devices 2 --precision bf16
    train plan configs/cifar10.yaml --price 2.50 --json
    """
    from train.plan.forecast import Question, answer

    answer(Question(settings, memory, devices, precision, price, quick), as_json=as_json)
