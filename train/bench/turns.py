"""One turn of a measurement: a launch of train/main.py, and what its folder says afterwards."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.bench.setups import Files, Setup
from train.errors import RunError
from train.profiling import traces
from train.profiling.traces import Communication

MAIN = Path(__file__).parent.parent / "main.py"
TRACED = 3  # steps, at the end of a turn


@dataclass(frozen=True)
class Turn:
    """What one launch has shown; the rates are those of the measured steps."""

    samples_per_second: float
    data_wait: float
    memory_gib: float
    communication: Communication | None  # None on one device
    weights_sha256: str
    others: float  # CPU cores that were busy for others meanwhile
    says: list[str]  # how the run describes itself
    metrics: list[dict[str, Any]]


def total_steps(warmup: int, steps: int) -> int:
    """Of a turn: at the end the traced ones, one to warm the profiler up, and one to start it in, which would be measured."""
    return warmup + steps + 2 + TRACED


def launch(setup: Setup, files: Files, words: Sequence[str], scratch: Path, *, warmup: int, steps: int) -> Turn:
    """Train in a folder that is removed afterwards. RunError with what the run said when it fails."""
    several = setup.devices > 1
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "-q",
        "--config_file",
        str(files.accelerate),
    ]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        settings = [str(files.config), *words, f"run.output_dir={folder}"]
        end = total_steps(warmup, steps)
        profile = ["--profile", f"{end - TRACED + 1}..{end}"] if several else []
        busy, own, began = _busy_seconds(), _own_seconds(), time.perf_counter()
        code, output = _run([*launcher, "--main_process_port", "0", str(MAIN), *settings, *profile])
        others = (_busy_seconds() - busy - _own_seconds() + own) / (time.perf_counter() - began)
        if code:
            raise RunError(f"{setup.name}: a turn has failed:\n{_why(output)}")
        [made] = Path(folder).iterdir()
        summary = json.loads((made / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        measured = [line for line in lines if warmup < line["step"] <= warmup + steps]
        seconds = [1 / line["train/samples_per_second"] for line in measured]  # a sample; all lines are of equally many steps
        waited = [line["train/data_wait"] * second for line, second in zip(measured, seconds, strict=True)]
        return Turn(
            samples_per_second=len(seconds) / sum(seconds),
            data_wait=sum(waited) / sum(seconds),
            memory_gib=measured[-1]["train/memory_gib"],
            communication=traces.read(sorted(made.glob("trace-*.json"))) if several else None,
            weights_sha256=summary["weights_sha256"],
            others=max(0.0, others),
            says=[line for line in output.splitlines() if line.startswith(("model: ", "mode: ", "device: ", "batch: "))],
            metrics=lines,
        )


def _run(command: list[str]) -> tuple[int, str]:
    """The exit code of a command and what it said, after all its processes have ended, also where this one is interrupted."""
    environment = os.environ | {"KINETO_LOG_LEVEL": "5"}  # the profiler's own remarks are no part of what the run says
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.communicate()  # to the end of the pipe, which the run's processes hold longer than the launcher lives
        raise
    return process.returncode, output


def _why(output: str) -> str:
    """The run's own words from its error on, without the launcher's after them; where it says none, the last ones."""
    if found := re.search(r"^(\[process \d+\] )?error: .*", output, re.MULTILINE | re.DOTALL):
        return re.split(r"^(?:[EWI]\d{4} |Traceback )", found[0], maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    return "\n".join(output.splitlines()[-20:])


def _busy_seconds() -> float:
    """CPU time of the whole machine but its idle one, in all processes."""
    user, nice, system, _, _, interrupt, soft, stolen = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + interrupt + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )
