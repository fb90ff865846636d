"""Runs of a model of `tests.spies`, with what it has noted."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import Runner


@dataclass
class Spied:
    """What a run has left, and what its model has noted."""

    code: int
    output: str
    passes: list[dict[str, Any]]
    folder: Path
    processes: int

    def steps(self, field: str = "ids", lanes: int = 4) -> list[list[Any]]:
        """The global batch of each step, in the order of its lanes; a step that was not completed is left out."""
        local = lanes // self.processes
        by_rank = [[entry[field] for entry in self.passes if entry["rank"] == rank] for rank in range(self.processes)]
        count = min(len(entries) // local for entries in by_rank)
        return [
            [item for entries in by_rank for micro in entries[step * local : (step + 1) * local] for item in micro]
            for step in range(count)
        ]

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def weights(self) -> str:
        assert self.summary["status"] == "finished"
        return str(self.summary["weights_sha256"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def logged(self, key: str) -> list[tuple[int, str]]:
        """Each step's value of a metric, to the last bit."""
        return [(line["step"], float(line[key]).hex()) for line in self.metrics if key in line]


def spied(train: Runner, *settings: str, processes: int = 1, kill: int = 0) -> Spied:
    """A run to its end or, with `kill`, until its last process is ended by SIGKILL in that one of its forward passes."""
    log = train.folder / f"passes-{train.count}.jsonl"
    log.touch()
    train.environment["SPY_LOG"] = str(log)
    train.environment["SPY_KILL"] = str(kill)
    train.environment["SPY_KILL_RANK"] = str(processes - 1)
    finished = train.run(*settings, processes=processes)
    # The others of a killed process end by themselves, as failed.
    assert finished.code in ((1, -signal.SIGKILL) if kill else (0,)), finished.output
    [folder] = train.outputs.iterdir() if train.outputs.is_dir() else [train.outputs]
    passes = [json.loads(line) for line in log.read_text().splitlines()]
    return Spied(finished.code, finished.output, passes, folder, processes)
