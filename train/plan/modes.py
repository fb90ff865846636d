"""What each mode takes on each of its devices, from traces of the single one: arithmetic alone.

A process keeps log2 of its lanes partial sums (`TreeSum`), and everything else of a lane is what a trace of two lanes shows. What
modes of several devices add:

    ddp             DDP's buckets are a copy of the gradients. One may still lie in what it was exchanged into when the next
                    step's activations are most; at the end of the passes, when those are gone, all do
    fsdp            1/N of weights, gradients, sums, optimizer state and average. Gathered, at most: the unit that is computed and
                    the one fetched ahead, and a unit's gradient with what it is exchanged into; and what is in no unit
    data_parallel   on the first device: gradients of another one arrive beside its own; each has its part of a lane's samples
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from train.plan.memory import Kind
from train.plan.trace import Trace

FORECAST = ("single", "ddp", "fsdp", "data_parallel")
_BUCKET = 25 * 2**20  # DDP's bucket_cap_mb


@dataclass(frozen=True)
class Line:
    """The memory of a step as a function of a lane's samples: bytes, by what they are for, of two traces of different size."""

    one: Trace
    other: Trace

    def at(self, micro_batch: int) -> Trace:
        """Activations grow by the same with each sample; all else is as it is."""
        one, other = self.one, self.other
        far = (micro_batch - one.micro_batch) / (other.micro_batch - one.micro_batch)

        def between(first: float, second: float) -> int:
            return max(0, round(first + (second - first) * far))

        def all_between(first: Counter[Kind], second: Counter[Kind]) -> Counter[Kind]:
            return Counter({kind: between(first[kind], second[kind]) for kind in first})

        return Trace(
            micro_batch=micro_batch,
            lanes=one.lanes,
            passes=all_between(one.passes, other.passes),
            update=all_between(one.update, other.update),
            gradient=one.gradient,
            inputs=between(one.inputs, other.inputs),
            largest_unit=one.largest_unit,
            outside_units=one.outside_units,
        )


def needs(mode: str, devices: int, lanes: int, line: Line, micro_batch: int, *, strict: bool) -> Counter[str]:
    """Bytes on the fullest device, by what they are for, when they are most. `lanes` are those of a whole step."""
    traced = line.at(-(-micro_batch // devices) if mode == "data_parallel" else micro_batch)
    own = lanes // devices if mode in ("ddp", "fsdp") else lanes
    sums = own.bit_length() - 1 if strict else 0
    passes: Counter[str] = Counter(traced.passes)
    passes["activations"] += (own - traced.lanes) * traced.inputs
    if strict:
        passes["gradients"] -= (traced.lanes - 1) * traced.gradient  # the partial sum that the trace has
        passes["partial sums"] = sums * traced.gradient
    update: Counter[str] = Counter(traced.update)
    moments = [passes, update]
    if mode == "ddp":
        kept = {kind: traced.update[kind] for kind in ("weights", "optimizer state", "averaged weights")}
        others = max(0, traced.gradient - _BUCKET)
        gradients = {"gradients": traced.gradient, "partial sums": passes["partial sums"], "communication": others}
        moments.append(Counter(kept | gradients))
    return max((_in_mode(moment, mode, devices, traced) for moment in moments), key=Counter.total)


def _in_mode(moment: Counter[str], mode: str, devices: int, traced: Trace) -> Counter[str]:
    exchanged: Counter[str] = Counter()
    if mode == "ddp":
        exchanged["communication"] = traced.gradient + min(traced.gradient, _BUCKET)
    elif mode == "data_parallel":
        exchanged["communication"] = traced.gradient
    elif mode == "fsdp":
        exchanged["communication"] = traced.outside_units + 4 * traced.largest_unit
        moment = Counter({kind: bytes_ if kind == "activations" else -(-bytes_ // devices) for kind, bytes_ in moment.items()})
    return moment + exchanged
