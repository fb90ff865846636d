"""Two receipts side by side: the first step whose numbers part, what differs in what made them, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from train.config import Effect, differences, recorded
from train.receipt.document import Receipt

# How far rounding alone may carry two runs apart that learn the same: a part of the loss at that step, or, where the loss is
# nearly nothing and its noise is not, of the largest one. Other kernels carry the digits' losses 0.01 of the largest apart.
TOLERANCE = 0.05
OF_LARGEST = 0.02
_TRACED = ("samples", "loss", "gradient norm")  # what parts first is told first: other samples make another loss


class Verdict(Enum):
    """What a re-run has shown, with the exit code that says it."""

    IDENTICAL = 0
    WITHIN_TOLERANCE = 3
    DIFFERENT = 4
    CANNOT_TELL = 5

    def __str__(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Parting:
    """The first step at which two runs do not have the same number."""

    step: int
    what: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} {self.then} -> {self.now}"


@dataclass(frozen=True)
class Comparison:
    """`steps` have numbers in both; `weights` are those at which both have a hash of the weights."""

    verdict: Verdict
    steps: list[int]
    weights: list[int]
    parting: Parting | None
    causes: list[str]
    reason: str = ""


def trace(receipt: Receipt) -> dict[int, dict[str, Any]]:
    return {step: {"loss": loss, "gradient norm": norm, "samples": samples} for step, loss, norm, samples in receipt["trace"]}


def weights(receipt: Receipt) -> dict[int, str]:
    """The hash of the weights after some steps."""
    found = {entry["step"]: entry["weights_sha256"] for entry in receipt["checkpoints"]}
    if result := receipt["result"]:
        found[result["step"]] = result["weights_sha256"]
    return found


def compare(then: Receipt, now: Receipt, *, after: int = 0) -> Comparison:
    """Judge `now` by `then`, of the steps beyond `after`."""
    traces, hashes = (trace(then), trace(now)), (weights(then), weights(now))
    steps = sorted(step for step in traces[0].keys() & traces[1].keys() if step > after)
    hashed = sorted(step for step in hashes[0].keys() & hashes[1].keys() if step > after)
    partings = [
        Parting(step, what, traces[0][step][what], traces[1][step][what])
        for step in steps
        for what in _TRACED
        if traces[0][step][what] != traces[1][step][what]
    ]
    partings += [
        Parting(step, "weights", hashes[0][step], hashes[1][step]) for step in hashed if hashes[0][step] != hashes[1][step]
    ]
    first = min(partings, key=lambda parting: parting.step, default=None)
    named = causes(then, now)
    if first and first.what == "samples" and not named:
        named = ["data: what the samples hold, in files of the same names, sizes, beginnings and ends"]
    if first is None and not hashed:
        reason = "no step at which both have a hash of the weights"
        return Comparison(Verdict.CANNOT_TELL, steps, hashed, None, named, reason)
    if first is None:
        return Comparison(Verdict.IDENTICAL, steps, hashed, None, named)
    largest = max((abs(entry["loss"]) for entry in traces[0].values() if isinstance(entry["loss"], float)), default=0.0)
    close = all(_close(traces[0][step]["loss"], traces[1][step]["loss"], largest) for step in steps)
    same_samples = not any(parting.what == "samples" for parting in partings)
    excused = excuses(then, now)
    if steps and close and same_samples and excused:
        reason = f"losses within {TOLERANCE:.0%}, or {OF_LARGEST:.0%} of the largest; {excused[0]}"
        return Comparison(Verdict.WITHIN_TOLERANCE, steps, hashed, first, named, reason)
    return Comparison(Verdict.DIFFERENT, steps, hashed, first, named)


def _close(then: Any, now: Any, largest: float) -> bool:
    """Of the numbers that are finite; others are words."""
    finite = isinstance(then, float) and isinstance(now, float)
    return finite and math.isclose(then, now, rel_tol=TOLERANCE, abs_tol=OF_LARGEST * largest)


def causes(then: Receipt, now: Receipt) -> list[str]:
    """All that differs in what made two runs."""
    return [*data(then, now), *configuration(then, now), *surroundings(then, now)]


def excuses(then: Receipt, now: Receipt) -> list[str]:
    """Why the last bits may differ though nothing is wrong."""
    if then["config"]["run"]["determinism"] != "strict":
        return ["run.determinism: fast promises no bits"]
    old, new = then["environments"][-1], now["environments"][-1]
    return [
        *_changed("devices", old["devices"], new["devices"]),
        *_changed("CPU", old["cpu"], new["cpu"]),
        *_changed("versions", _numeric(old["versions"]), _numeric(new["versions"])),
        *_changed("accelerate", *({key: side["launch"][key] for key in ("mode", "compiler")} for side in (old, new))),
    ]


def data(then: Receipt, now: Receipt) -> list[str]:
    return _changed("data", then["data"], now["data"])


def configuration(then: Receipt, now: Receipt) -> list[str]:
    """The keys that change a step's numbers."""
    old, new = (recorded(receipt["config"]) for receipt in (then, now))
    different = [found for found in differences(old, new) if found.effect in (Effect.NUMBERS, Effect.LENGTH)]
    elsewhere = ("data.path", "data.validation_path", "batch.lanes")  # what lies there is compared, and how many lanes there were
    lines = [f"config: {found.key}: {found.old} -> {found.new}" for found in different if found.key not in elsewhere]
    return lines + _changed("lanes", {"batch.lanes": then["lanes"]}, {"batch.lanes": now["lanes"]})


def surroundings(then: Receipt, now: Receipt) -> list[str]:
    """What differs in the environments of the last starts."""
    old, new = then["environments"][-1], now["environments"][-1]
    lines = []
    if old["code"]["digest"] != new["code"]["digest"]:
        lines.append(f"code: {_code(old['code'])} -> {_code(new['code'])}")
    for key in ("precision", "compiler", "mode", "device"):
        lines += _changed("accelerate", {key: old["launch"][key]}, {key: new["launch"][key]})
    lines += _changed("CPU", old["cpu"], new["cpu"])
    lines += _changed("devices", old["devices"], new["devices"])
    lines += _changed("versions", _numeric(old["versions"]), _numeric(new["versions"]))
    return lines + _changed("variables", old["variables"], new["variables"])


def _code(code: Mapping[str, Any]) -> str:
    commit = (code["commit"] or "no commit")[:12]
    return commit + (" with changes" if code["diff"] or code["diff_left_out"] else "")


def _numeric(versions: Mapping[str, Any]) -> dict[str, Any]:
    """Each version by its name, those of packages among the others."""
    return {**{key: value for key, value in versions.items() if key not in ("packages", "lock")}, **versions["packages"]}


def _changed(subject: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{subject}: {key}: {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys]


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
