"""`train verify` and `train diff`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from train.verb import Verb

if TYPE_CHECKING:
    from train.receipt.compare import Comparison


@click.command(cls=Verb)
@click.argument("receipt", type=click.Path(path_type=Path))
@click.option("--data", metavar="PATH", help="Where the run's data are here.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="To train with, whatever the run had.")
@click.option("--steps", type=click.IntRange(1), help="Stop after so many.")
@click.option(
    "--segment",
    type=click.IntRange(1),
    metavar="K",
    help="Only the K-th of the pieces between the checkpoints that are still there.",
)
@click.option("--all-segments", is_flag=True, help="All pieces between the checkpoints in the run's folder, at the same time.")
@click.option("--jobs", type=click.IntRange(1), help="Pieces at a time; by default as many as there are cores for.")
@click.option("--here", is_flag=True, help="Take this checkout's code, though it is not the run's.")
@click.option("--json", "as_json", is_flag=True, help="The verdict as one JSON object.")
def verify(
    receipt: Path,
    data: str | None,
    processes: int,
    steps: int | None,
    segment: int | None,
    all_segments: bool,
    jobs: int | None,
    here: bool,
    as_json: bool,
) -> None:
    """Make a run again from its RECEIPT (receipt.json, or the run's folder) and say whether it is the same.

    The code is fetched as it was, with git; the data are found by their path, or by --data; the rest is in the receipt. Any
    number of processes will do.

    \b
    exit code  verdict
    0          IDENTICAL         bit for bit
    3          WITHIN TOLERANCE  other devices, libraries or threads: losses within 5 %, or 2 % of the largest
    4          DIFFERENT         told with the first step, and with what else differs
    5          CANNOT TELL       code, data or numbers are missing
    1, 2       this command itself has failed, or was given something else than a receipt

    \b
    train verify outputs/digits-4336f066
    train verify receipt.json --data /pictures --processes 2 --steps 100
    """
    from train.receipt import document
    from train.receipt.verify import choose, default_jobs, worst
    from train.receipt.verify import verify as check

    made = document.read(receipt)
    folder = receipt if receipt.is_dir() else receipt.parent
    pieces = choose(made, folder, steps=steps, segment=segment, all_segments=all_segments)
    jobs = jobs or default_jobs(processes, len(pieces))
    say = (lambda text: None) if as_json else (lambda text: click.echo(text, err=True))
    found = check(made, pieces, data=data, processes=processes, jobs=jobs, here=here, say=say)
    verdict = worst([comparison for _, comparison in found])
    if as_json:
        click.echo(
            json.dumps({"verdict": str(verdict), "pieces": [_facts(str(piece), result) for piece, result in found]}, indent=2)
        )
    else:
        for piece, result in found:
            _tell(str(piece), result)
    sys.exit(verdict.value)


@click.command(cls=Verb)
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), help="Draw both losses and where they part (.svg or .png).")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def diff(first: Path, second: Path, plot: Path | None, as_json: bool) -> None:
    """What differs between two runs: FIRST and SECOND are receipts or folders of runs.

    Tells what differs in data, configuration, code and machine, and the first step whose numbers part. Exit codes as those of
    `train verify`.
    """
    from train.receipt import document
    from train.receipt.compare import compare

    receipts = document.read(first), document.read(second)
    found = compare(*receipts)
    if plot is not None:
        from train.receipt.plot import draw

        draw(*receipts, found.parting, plot)
    if as_json:
        click.echo(json.dumps(_facts(f"{first} and {second}", found), indent=2))
    else:
        _tell(f"{first} and {second}", found)
    sys.exit(found.verdict.value)


def _facts(what: str, result: Comparison) -> dict[str, Any]:
    parting = result.parting
    return {
        "what": what,
        "verdict": str(result.verdict),
        "reason": result.reason,
        "steps_compared": len(result.steps),
        "weights_compared_at": result.weights,
        "first_difference": None if parting is None else vars(parting),
        "differences": result.causes,
    }


def _tell(what: str, result: Comparison) -> None:
    colours = {"IDENTICAL": "green", "WITHIN TOLERANCE": "yellow", "DIFFERENT": "red", "CANNOT TELL": "yellow"}
    verdict = str(result.verdict)
    click.echo(
        f"{click.style(verdict, fg=colours[verdict], bold=True)}: {what}" + (f" ({result.reason})" if result.reason else "")
    )
    if result.weights:
        click.echo(f"  weights compared at step {', '.join(map(str, result.weights))}; numbers of {len(result.steps)} steps")
    if result.parting:
        click.echo(f"  first difference at {result.parting}")
    for cause in result.causes:
        click.echo(f"  {cause}")
