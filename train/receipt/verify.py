"""Re-running a receipt, whole or in pieces, and what that shows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from train import checkpoint
from train.errors import UsageError
from train.receipt import rerun
from train.receipt.compare import Comparison, Verdict, compare
from train.receipt.document import Receipt
from train.receipt.environment import ROOT
from train.receipt.rerun import CannotTell

Say = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """What of a run is made again: from a checkpoint, or the beginning, to a step, or the end."""

    start: int = 0
    stop: int | None = None
    checkpoint: Path | None = None

    def __str__(self) -> str:
        return (
            f"from {f'step {self.start}' if self.start else 'the beginning'} to {f'step {self.stop}' if self.stop else 'the end'}"
        )


def segments(receipt: Receipt, folder: Path) -> list[Piece]:
    """The pieces between the checkpoints that are still in the run's folder, the first being from the beginning."""
    there = {step: path for step, path in checkpoint.steps(folder / "checkpoints").items() if checkpoint.damage(path) is None}
    ends = sorted({entry["step"] for entry in receipt["checkpoints"]})
    if result := receipt["result"]:
        ends = sorted({*ends, result["step"]})
    starts = [0, *ends[:-1]]
    return [Piece(start, end, there.get(start)) for start, end in zip(starts, ends, strict=True) if start == 0 or start in there]


def choose(receipt: Receipt, folder: Path, *, steps: int | None, segment: int | None, all_segments: bool) -> list[Piece]:
    if segment is None and not all_segments:
        end = (receipt["result"] or {}).get("step")
        if end is None and not (end := max((entry["step"] for entry in receipt["checkpoints"]), default=0)):
            raise CannotTell("the run has neither ended nor saved, so that there is no hash of its weights to compare")
        if steps is not None and steps > end:
            raise UsageError(f"--steps {steps}: the receipt ends at step {end}")
        return [Piece(stop=steps or end)]
    found = segments(receipt, folder)
    if all_segments:
        return found
    assert segment is not None
    ends = sorted({piece.stop for piece in found if piece.stop is not None})
    if not 1 <= segment <= len(found):
        raise UsageError(f"--segment {segment}: there are 1 to {len(found)}, which end at the steps {', '.join(map(str, ends))}")
    return [found[segment - 1]]


def verify(
    receipt: Receipt, pieces: list[Piece], *, data: str | None, processes: int, jobs: int, here: bool, say: Say
) -> list[tuple[Piece, Comparison]]:
    """Each piece made again in a folder that is removed, `jobs` of them at a time."""
    with tempfile.TemporaryDirectory(prefix="verify-") as name, rerun.code(receipt, Path(name), here=here) as tree:
        if tree != ROOT:
            say(f"code: {receipt['environments'][-1]['code']['commit'][:12]}, as the receipt has it, and not this checkout's")
        config = rerun.config(receipt, tree, data)

        def one(number: int) -> Comparison:
            piece = pieces[number]
            say(f"training {piece} on {processes} process{'es' if processes > 1 else ''} ...")
            folder = Path(name) / f"piece-{number}"
            again = rerun.rerun(
                receipt, tree, config, folder, processes=processes, stop_at=piece.stop, resume_from=piece.checkpoint
            )
            return _judge(receipt, again, piece)

        with ThreadPoolExecutor(jobs) as pool:
            return list(zip(pieces, pool.map(one, range(len(pieces))), strict=True))


def _judge(receipt: Receipt, again: Receipt, piece: Piece) -> Comparison:
    """An end without a hash in the receipt, as --steps may choose one, is judged by the numbers of the steps alone."""
    comparison = compare(receipt, again, after=piece.start)
    if comparison.verdict is Verdict.CANNOT_TELL and comparison.steps:
        reason = f"by loss, gradient norm and samples of {len(comparison.steps)} steps; no weights' hash lies among them"
        return replace(comparison, verdict=Verdict.IDENTICAL, reason=reason)
    return comparison


def worst(comparisons: list[Comparison]) -> Verdict:
    return max((comparison.verdict for comparison in comparisons), key=lambda verdict: verdict.value)


def default_jobs(processes: int, pieces: int) -> int:
    return max(1, min(pieces, len(os.sched_getaffinity(0)) // processes))
