"""Four seeds at once beside four runs one after the other: the training's samples/s, by whole commands that take turns.

    python benchmarks/seeds.py [CONFIG.yaml ...] [key=value ...] [--rounds 5] [--steps 60]

The rates are those that the runs write down, without the start of the program, and without the first ten steps of each. Then
one step of four stacked models (torch.func.vmap) is timed beside four steps, both without dropout, whose masks vmap would draw
otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from train import models
from train.bench.conditions import conditions
from train.bench.loop import open_job
from train.config import Config
from train.run import load_config

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2, 3)
LOG_EVERY = 10


def trained(words: list[str], folder: Path, seeds: str) -> float:
    """The seconds of a command, which leaves its runs in `folder`."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "train" / "main.py"), *words, seeds, f"run.output_dir={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def seconds(folder: Path, batch: int) -> dict[str, tuple[int, float]]:
    """Of each run, the samples of its logged steps but the first, and how long they took; by its weights' hash."""
    found = {}
    for path in folder.glob("*/summary.json"):
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        rates = [line["train/samples_per_second"] for line in lines if "train/loss" in line][1:]
        samples = LOG_EVERY * batch
        found[json.loads(path.read_text())["weights_sha256"]] = len(rates) * samples, sum(samples / rate for rate in rates)
    return found


def one_round(words: list[str], batch: int, *, alone_first: bool) -> dict[str, tuple[float, float]]:
    """Samples/s of the training and seconds of the commands, for both ways; and the same weights."""
    with tempfile.TemporaryDirectory() as scratch:
        places = {"alone": Path(scratch) / "alone", "at once": Path(scratch) / "at-once"}
        commands: dict[str, Callable[[], float]] = {
            "alone": lambda: sum(trained(words, places["alone"], f"run.seed={seed}") for seed in SEEDS),
            "at once": lambda: trained(words, places["at once"], f"seeds=[{','.join(map(str, SEEDS))}]"),
        }
        took = {name: commands[name]() for name in sorted(commands, reverse=not alone_first)}
        runs = {name: seconds(place, batch) for name, place in places.items()}
    assert len(runs["alone"]) == len(SEEDS) and runs["alone"].keys() == runs["at once"].keys(), "not the same bits"
    samples = {name: sum(samples for samples, _ in found.values()) for name, found in runs.items()}
    return {
        "alone": (samples["alone"] / sum(spent for _, spent in runs["alone"].values()), took["alone"]),
        "at once": (samples["at once"] / fmean(spent for _, spent in runs["at once"].values()), took["at once"]),
    }


def stacked(config: Config, rounds: int) -> list[float]:
    """Seconds of four micro-batches' passes by four models, as a multiple of those by their stack; one a round."""
    job = open_job(config)
    makers = [models.build(config.model, job.task.given) for _ in SEEDS]
    plain = [without_dropout(model).to(job.accelerator.device).train() for model in makers]
    batch = job.blank.to(job.accelerator.device)
    inputs, labels = job.task.inputs(batch), batch.fields["label"]
    parameters, buffers = stack_module_state(plain)
    many_inputs, many_labels = (value.expand(len(SEEDS), *value.shape).contiguous() for value in (inputs, labels))

    def loss(own: dict[str, Tensor], state: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(plain[0], (own, state), (image,)), label, reduction="sum")

    def together() -> None:
        vmap(loss)(parameters, buffers, many_inputs, many_labels).sum().backward()

    def apart() -> None:
        for model in plain:
            functional.cross_entropy(model(inputs), labels, reduction="sum").backward()

    return [timed(apart) / timed(together) for _ in range(rounds + 1)][1:]


def without_dropout(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, nn.Identity() if isinstance(child, nn.Dropout) else without_dropout(child))
    return model


def timed(work: Callable[[], None], times: int = 5) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


@click.command()
@click.argument("settings", nargs=-1)
@click.option("--rounds", default=5, show_default=True, help="Turns of each way.")
@click.option("--steps", default=60, show_default=True, help="Steps of a run.")
def main(settings: tuple[str, ...], rounds: int, steps: int) -> None:
    words = [*(settings or [str(ROOT / "configs" / "mnist.yaml")])]
    words += [f"steps={steps}", f"tracking.every={LOG_EVERY}", "evaluate.every=0", "checkpoint.every=0"]
    files = [Path(word) for word in words if "=" not in word]
    with tempfile.TemporaryDirectory() as scratch:
        config = load_config(files, [*(word for word in words if "=" in word), f"run.output_dir={scratch}"])
        found = []
        for number in range(rounds):
            print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)
            found.append(one_round(words, config.batch.size, alone_first=number % 2 == 0))
        ratios = stacked(config, max(rounds, 5))
    columns = {name: list(zip(*(one[name] for one in found), strict=True)) for name in ("alone", "at once")}
    rows = []
    for name, label in (("alone", "four runs one after the other"), ("at once", "four seeds at once")):
        gains = [own / one for own, one in zip(columns[name][0], columns["alone"][0], strict=True)]
        rows.append([label, *(spread(list(values), ",.0f") for values in columns[name]), spread(gains, ".2f")])
    machine = conditions(["0"] if torch.cuda.is_available() else [])
    title = f"`python benchmarks/seeds.py {' '.join(Path(word).name if '/' in word else word for word in settings)}`"
    notes = [
        f"{title}, {rounds} rounds of {steps} steps; medians, with the least and the most",
        *(machine[key] for key in ("devices", "software")),
        "the weights of each seed have the same bits both ways, in every round",
        f"time of four models' passes, as a multiple of their stack's (`torch.func.vmap`, no dropout): {spread(ratios, '.2f')}",
    ]
    text = results.table(["way", "samples/s of the training", "seconds of the commands", "rate / one after the other"], rows)
    results.record("Several seeds", "\n".join([*(f"- {note}" for note in notes), "", text]))
    print(text, *notes, sep="\n")


if __name__ == "__main__":
    main()
