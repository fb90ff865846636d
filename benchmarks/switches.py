"""What each switch changes in the time and the memory of a step.

    python benchmarks/switches.py CONFIG.yaml key=value ... [--with 'KEY=VALUE ...'] [--rounds 5] [--steps 3]

It is `train bench step --with ...` with a list of switches, each a variant in a process of its own that takes turns with the
configuration as it is, and its numbers are kept in RESULTS.md. The default list is for torchvision's ResNets.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results

BASE = "data in memory"  # as `train bench step` calls it
SWITCHES = (
    "speed.channels_last=true",
    "speed.compile=model",
    "speed.compile=blocks",
    "speed.precision=bf16",
    "speed.recompute=[layer1,layer2,layer3,layer4]",
    "batch.lanes=1",
)


def bench_step(words: Iterable[str], variants: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """What `train bench step` has measured of the variants, in turns."""
    options = [word for variant in variants for word in ("--with", variant)]
    command = [*words, *options, "--rounds", str(rounds), "--steps", str(steps), "--json"]
    root = Path(__file__).parent.parent
    bench = [sys.executable, "-m", "train", "bench", "step"]
    ended = subprocess.run([*bench, *command], stdout=subprocess.PIPE, text=True, cwd=root)
    if ended.returncode:
        sys.exit(ended.returncode)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def shown(words: Iterable[str]) -> str:
    """A command without the folder that is another one on each machine."""
    return re.sub(r"data\.path=\S+", "data.path=FOLDER", shlex.join(words))


def about(found: dict[str, Any]) -> str:
    config, facts = found["config"], found["conditions"]
    lanes = config["batch"]["lanes"]
    batch = f"{config['batch']['size']} samples a step" + (f" = {lanes} lanes" if isinstance(lanes, int) else "")
    run = config["run"]
    return f"- {config['model']['name']}, {batch}, {run['determinism']}\n- {facts['devices']}\n- {facts['software']}"


@click.command(help=__doc__)
@click.argument("settings", nargs=-1, required=True)
@click.option("--with", "variants", multiple=True, default=SWITCHES, help="Settings over the configuration; again for more.")
@click.option("--rounds", default=5, show_default=True, help="Turns of each.")
@click.option("--steps", default=3, show_default=True, help="Measured steps of a turn.")
def main(settings: tuple[str, ...], variants: tuple[str, ...], rounds: int, steps: int) -> None:
    found = bench_step(settings, variants, rounds, steps)
    rows = [
        [
            "none" if name == BASE else f"`{name}`",
            results.spread([1000 * value for value in found["seconds"][name]], "{:.0f}"),
            results.spread(found["times_data_in_memory"][name], "{:.2f}"),
            f"{found['memory_gib'][name]:.2f}",
        ]
        for name in (BASE, *variants)
    ]
    command = shown(["python", "benchmarks/switches.py", *settings, "--rounds", str(rounds), "--steps", str(steps)])
    text = "\n".join(
        [
            f"- `{command}`: a step with its data in memory, medians of the rounds",
            about(found),
            "",
            results.table(["switch", "ms a step", "times none", "peak memory, GiB"], rows),
        ]
    )
    click.echo(text)
    results.record("Switches", text)


if __name__ == "__main__":
    main()
