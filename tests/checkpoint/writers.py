"""Run as a script on a folder: starts a process that saves into it without end, for each line it is sent."""

import os
import sys
from itertools import count
from pathlib import Path

from snapshots import snapshot

from train.checkpoint import clean, latest, prune, read, write


def save_for_ever(folder: Path) -> None:
    """As a run does: go on after the latest, each step saved twice so that replacing is killed too, the newest kept."""
    clean(folder)
    path, _ = latest(folder)
    for step in count(1 + (read(path).step if path else 0)):
        write(folder, snapshot(step, megabytes=30))
        write(folder, snapshot(step, megabytes=30))
        prune(folder, written=step, keep=1, best=None)


def start_writers(folder: Path) -> None:
    """A process that forks a writer for each line it is sent and answers with its number: torch is imported once."""
    for _ in sys.stdin:
        if not (writer := os.fork()):
            save_for_ever(folder)
        print(writer, flush=True)
        _, status = os.waitpid(writer, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    start_writers(Path(sys.argv[1]))
