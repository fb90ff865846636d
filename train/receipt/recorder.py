"""Keeps the receipt of a run while it goes on. Only the main process has one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import xxhash

from train.receipt import document
from train.receipt.environment import ROOT, environment
from train.saving import Saved
from train.weights import weights_sha256

if TYPE_CHECKING:
    from train.checkpoint import Snapshot
    from train.job import Job
    from train.run_folder import RunFolder

_LONGEST_TRACE = 4096  # entries, of some 80 bytes
_MODULUS = 2**63
_NOTHING: dict[str, list[Any]] = {"environments": [], "starts": [], "trace": [], "checkpoints": []}


def shown(before: int, step: int, lanes: Iterable[tuple[int, int]]) -> int:
    """The digest of all that was shown until after `step`, from the one before and the lanes with their batches' digests.

    A sum, so that each process can add up its own lanes; each term knows its step and lane.
    """
    return (before + sum(xxhash.xxh3_64_intdigest(f"{step} {lane} {digest}".encode()) for lane, digest in lanes)) % _MODULUS


def together(parts: Iterable[int]) -> int:
    """The digest of what all processes were shown, each its part."""
    return sum(parts) % _MODULUS


class Recorder:
    """Goes on with what the checkpoint has kept of the receipt, where the run goes on from one."""

    def __init__(self, job: Job, folder: RunFolder, places: Mapping[str, str], snapshot: Snapshot | None) -> None:
        self.job, self.folder, self.places = job, folder, dict(places)
        kept = (snapshot.state["receipt"] if snapshot else None) or _NOTHING
        self._environments, self._starts = list(kept["environments"]), list(kept["starts"])
        self._trace, self._checkpoints = list(kept["trace"]), list(kept["checkpoints"])
        now = environment(job.launch(), job.threads)
        if now not in self._environments:
            self._environments.append(now)
        if snapshot:
            self._checkpoints.append(Saved(snapshot.step, weights_sha256(snapshot.final))._asdict())
        self._starts.append(
            {
                "step": snapshot.step if snapshot else 0,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "environment": self._environments.index(now),
                "processes": job.processes.count,
            }
        )
        self.write(None)

    def history(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "environments": list(self._environments),
            "starts": list(self._starts),
            "trace": list(self._trace),
            "checkpoints": list(self._checkpoints),
        }

    def step(self, step: int, loss: float, norm: float, samples: int) -> None:
        """A long run keeps every other entry, and of these every other one: a function of the steps, whoever has made them."""
        every = math.gcd(*(entry[0] for entry in self._trace[:-1]))
        if every and self._trace[-1][0] % every:
            self._trace.pop()  # it was there as the newest
        self._trace.append([step, _plain(loss), _plain(norm), f"{samples:016x}"])
        if len(self._trace) > _LONGEST_TRACE:
            self._trace = [entry for entry in self._trace if entry[0] % (2 * every) == 0]

    def saved(self, checkpoint: Saved) -> None:
        self._checkpoints.append(checkpoint._asdict())
        self.write(None)

    def write(self, result: Mapping[str, Any] | None) -> None:
        job = self.job
        receipt = {
            "run": job.config.folder.name,
            "config": _without_checkout(job.config.model_dump(mode="json")),
            "places": _without_checkout(self.places),
            "data": job.data(),
            "lanes": job.lanes.count,
            "steps": job.total_steps,
            **self.history(),
            "result": result,
        }
        self.folder.write(document.NAME, document.sealed(receipt))


def _without_checkout(value: Any) -> Any:
    """Paths below the checkout as every checkout has them."""
    if isinstance(value, dict):
        return {key: _without_checkout(item) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(f"{ROOT}/"):
        return document.CHECKOUT + value.removeprefix(str(ROOT))
    return value


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
