"""How much memory the steps take at one lane, beside a bare PyTorch loop and Accelerate's (those of benchmarks/loop.py).

    python benchmarks/memory.py [CONFIG.yaml ...] [key=value ...] [--rounds 5] [--steps 12]

Each loop is in a process of its own, that is stopped before the next begins, in shuffled order. On a GPU the number is the peak
of what PyTorch's allocator has given, over what it had given before the first step: the weights are there before; gradients, the
optimizer's state, activations and batches are not. On a CPU the profiler tells that same number, in turns of their own
("tensors"); beside it stands how much the whole process grows (Linux). That has the holes too which the C library's allocator
leaves between blocks, and how many those are is chance.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, chain
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import click
import results
import torch
from loop import BARE, OURS, StepLog, accelerated, bare, one_lane, ours, pictures
from switches import shown
from torch.profiler import ProfilerActivity, profile

from train.bench.conditions import conditions
from train.bench.loop import open_job
from train.config import Config
from train.job import Job
from train.run_folder import RunFolder
from train.stopping import ask_for_signal_when_parent_dies

MIB = 2**20
Measure = Callable[[torch.device, Callable[[int], None], int], int]
LOOPS: dict[str, Callable[[Job], Callable[[int], None]]] = {
    BARE: lambda job: bare(job, pictures(job), StepLog(sys.stderr)),
    "Accelerate loop": lambda job: accelerated(job, pictures(job), StepLog(sys.stderr)),
    OURS: lambda job: ours(job, RunFolder(job.config.folder), nullcontext),
}


def measured(measure: Measure, name: str, config: Config, steps: int) -> int:
    """Bytes, in a process that is ended with all that it has started."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_tell, args=(measure, name, config, steps, sender))
    process.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError:
        raise click.ClickException(f"{name} has failed; what it says is above") from None
    finally:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _tell(measure: Measure, name: str, config: Config, steps: int, sender: Connection) -> None:
    os.setsid()
    ask_for_signal_when_parent_dies(signal.SIGKILL)
    job = open_job(config)
    sender.send(measure(job.accelerator.device, LOOPS[name](job), steps))
    signal.pause()


def tensors(device: torch.device, train: Callable[[int], None], steps: int) -> int:
    """What PyTorch's allocator has given at one time, over what it had given before the first step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        train(steps)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(steps)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


def process(device: torch.device, train: Callable[[int], None], steps: int) -> int:
    """The peak of the process, over what it held before the first step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what the setup has freed would count as held, and be taken again for nothing
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    train(steps)
    return status("VmHWM") - before


def status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])


@click.command(help=__doc__)
@click.argument("settings", nargs=-1)
@click.option("--rounds", default=5, show_default=True, help="Turns of each loop.")
@click.option("--steps", default=12, show_default=True, help="Steps of a turn.")
def main(settings: tuple[str, ...], rounds: int, steps: int) -> None:
    measures = {"tensors": tensors} if torch.cuda.is_available() else {"tensors": tensors, "process": process}
    found: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in LOOPS for kind in measures}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            for place, (name, kind) in enumerate(order.sample(list(found), len(found))):
                config = one_lane(settings, Path(scratch) / f"{number}-{place}", steps + 1)
                found[name, kind].append(measured(measures[kind], name, config, steps) / MIB)
                click.echo(f"round {number + 1}/{rounds}: {name}, {kind} {found[name, kind][-1]:.1f} MiB", err=True)
    rows = [[name, *chain.from_iterable(cells(found[name, kind], found[BARE, kind]) for kind in measures)] for name in LOOPS]
    known = conditions(["0"] if torch.cuda.is_available() else [])
    command = shown(["python", "benchmarks/memory.py", *settings, "--rounds", str(rounds), "--steps", str(steps)])
    lines = [
        f"`{command}`, medians of the rounds: the peak during {steps} steps over what there was before the first",
        f"{config.model.name}, one lane of {config.batch.size}",
        known["devices"],
        known["software"],
    ]
    header = ["loop", *chain.from_iterable((f"{kind}, MiB", "times bare") for kind in measures)]
    text = "\n".join([*(f"- {line}" for line in lines), "", results.table(header, rows)])
    click.echo(text)
    results.record("Memory", text)


def cells(own: list[float], others: list[float]) -> list[str]:
    ratios = [one / other for one, other in zip(own, others, strict=True)]
    return [results.spread(own, "{:.1f}"), results.spread(ratios, "{:.3f}")]


if __name__ == "__main__":
    main()
