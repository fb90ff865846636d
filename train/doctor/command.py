"""`train doctor`: can this machine run the project, and how well."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from train.verb import Verb


@click.command(cls=Verb)
@click.option("--json", "as_json", is_flag=True, help="All findings as one JSON object, for scripts.")
@click.option("--quick", is_flag=True, help="Measure nothing.")
def doctor(as_json: bool, quick: bool) -> None:
    """Say whether this machine can run the project, and how well.

    Looks at the driver, CUDA, GPUs, memory, shared memory, folders, libraries and versions, and measures for some seconds how
    fast memory is copied and matrices are multiplied, beside what the card's maker publishes. Each line that is not as it
    should be says what to do. Works without a GPU. Exit code 1 where something has failed.

    \b
    train doctor
    train doctor --json | jq '.GPU'
    """
    from train.doctor.findings import broken, show
    from train.doctor.sections import SECTIONS, speed

    sections = {**SECTIONS} if quick else {**SECTIONS, "Speed": speed}
    report = {}
    for title, examine in sections.items():
        if title == "Speed":
            click.echo("measuring, which takes some seconds ...", err=True)
        try:
            report[title] = examine()
        except Exception as error:  # one thing that is broken must not hide the others
            report[title] = [broken(title, error)]
        if not as_json:
            show(title, report[title])
    if as_json:
        click.echo(json.dumps({title: [asdict(finding) for finding in findings] for title, findings in report.items()}, indent=2))
    sys.exit(any(finding.state == "failed" for findings in report.values() for finding in findings))
