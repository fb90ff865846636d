"""What strict determinism costs: a step of each recipe, strict and fast, in turns.

    python benchmarks/determinism.py "CONFIG.yaml key=value ..." ["CONFIG.yaml ..."] ... [--rounds 5] [--steps 5]

Each argument is what `train bench step` takes. Both levels compute with one CPU thread, so that the kernels are what differs; the
last column is fast with all the CPU threads that it takes by itself, as strict does not. Data are in memory.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
from switches import BASE, bench_step, shown

ONE, ALL = "run.determinism=fast", "run.determinism=fast run.threads=auto"


@click.command(help=__doc__)
@click.argument("recipes", nargs=-1, required=True)
@click.option("--rounds", default=5, show_default=True, help="Turns of each.")
@click.option("--steps", default=5, show_default=True, help="Measured steps of a turn.")
def main(recipes: tuple[str, ...], rounds: int, steps: int) -> None:
    rows, facts = [], {}
    for recipe in recipes:
        words = shlex.split(recipe)
        click.echo(recipe, err=True)
        strict = ["run.determinism=strict", "run.threads=1"]
        found = bench_step([*words, *strict], [ONE, ALL], rounds, steps)
        facts, seconds, batch = found["conditions"], found["seconds"], found["config"]["batch"]
        costs = {name: [one / other for one, other in zip(seconds[BASE], seconds[name], strict=True)] for name in (ONE, ALL)}
        rows.append(
            [
                f"`{shown(words)}`",
                f"{batch['size']} = {batch['lanes']} lanes",
                results.spread([1000 * value for value in seconds[BASE]], "{:.1f}"),
                results.spread([1000 * value for value in seconds[ONE]], "{:.1f}"),
                results.spread(costs[ONE], "{:.3f}"),
                results.spread(costs[ALL], "{:.2f}"),
            ]
        )
    header = ["recipe", "batch", "strict, ms a step", "fast, ms", "strict / fast", "strict / fast with all threads"]
    text = "\n".join(
        [
            f"- `python benchmarks/determinism.py RECIPE ... --rounds {rounds} --steps {steps}`, medians of the rounds",
            f"- {facts['devices']}; one CPU thread but in the last column",
            f"- {facts['software']}",
            "",
            results.table(header, rows),
        ]
    )
    click.echo(text)
    results.record("Strict against fast", text)


if __name__ == "__main__":
    main()
