"""How much memory the steps take at one lane, beside a bare PyTorch loop and Accelerate's (those of benchmarks/loop.py).

    python benchmarks/memory.py [CONFIG.yaml ...] [key=value ...] [--rounds 5] [--steps 12]

Each loop is in a process of its own, that is stopped before the next begins, in shuffled order. The number is the peak during its
steps over what the process had before the first one: of the GPU, or of the process (Linux) where there is none. The weights are
there before; gradients, the optimizer's state, activations and batches are not.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch
from loop import BARE, OURS, StepLog, accelerated, bare, one_lane, ours, pictures
from switches import shown

from train.bench.conditions import conditions
from train.bench.loop import open_job
from train.config import Config
from train.job import Job
from train.run_folder import RunFolder
from train.stopping import ask_for_signal_when_parent_dies

MIB = 2**20
LOOPS: dict[str, Callable[[Job], Callable[[int], None]]] = {
    BARE: lambda job: bare(job, pictures(job), StepLog(sys.stderr)),
    "Accelerate loop": lambda job: accelerated(job, pictures(job), StepLog(sys.stderr)),
    OURS: lambda job: ours(job, RunFolder(job.config.folder), nullcontext),
}


def growth(name: str, config: Config, steps: int) -> int:
    """Bytes, measured in a process that is ended with all that it has started."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_measure, args=(name, config, steps, sender))
    process.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError:
        raise click.ClickException(f"{name} has failed; what it says is above") from None
    finally:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _measure(name: str, config: Config, steps: int, sender: Connection) -> None:
    os.setsid()
    ask_for_signal_when_parent_dies(signal.SIGKILL)
    job = open_job(config)
    train = LOOPS[name](job)
    before = now(job.accelerator.device)
    train(steps)
    sender.send(peak(job.accelerator.device) - before)
    signal.pause()


def now(device: torch.device) -> int:
    """Bytes in use; the peak begins here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status("VmHWM")


def status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


@click.command(help=__doc__)
@click.argument("settings", nargs=-1)
@click.option("--rounds", default=5, show_default=True, help="Turns of each loop.")
@click.option("--steps", default=12, show_default=True, help="Steps of a turn.")
def main(settings: tuple[str, ...], rounds: int, steps: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in LOOPS}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            for name in order.sample(list(LOOPS), len(LOOPS)):
                config = one_lane(settings, Path(scratch) / f"{number}-{len(found[name])}-{name[0]}", steps + 1)
                found[name].append(growth(name, config, steps) / MIB)
                click.echo(f"round {number + 1}/{rounds}: {name} {found[name][-1]:.1f} MiB", err=True)
    rows = [
        [
            name,
            results.spread(own, "{:.1f}"),
            results.spread([one / other for one, other in zip(own, found[BARE], strict=True)], "{:.3f}"),
        ]
        for name, own in sorted(found.items(), key=lambda item: statistics.median(item[1]))
    ]
    known = conditions(["0"] if torch.cuda.is_available() else [])
    command = shown(["python", "benchmarks/memory.py", *settings, "--rounds", str(rounds), "--steps", str(steps)])
    lines = [
        f"`{command}`, medians of the rounds: the peak during {steps} steps over what there was before the first",
        f"{config.model.name}, one lane of {config.batch.size}; of the {'GPU' if torch.cuda.is_available() else 'process'}",
        known["devices"],
        known["software"],
    ]
    text = "\n".join([*(f"- {line}" for line in lines), "", results.table(["loop", "MiB", f"times the {BARE}"], rows)])
    click.echo(text)
    results.record("Memory", text)


if __name__ == "__main__":
    main()
