"""What each mode takes on each of its devices, from traces of the single one: arithmetic alone.

A process keeps log2 of its lanes partial sums (`TreeSum`), and everything else of a lane is what a trace of two lanes shows. What
modes of several devices add or change:

    ddp             DDP's buckets are a copy of the gradients. One may still lie in what it was exchanged into when the next
                    step's activations are most; at the end of the passes, when those are gone, all do
    fsdp            1/N of weights, gradients, sums, optimizer state and average. Gathered, at most: the unit that is computed and
                    the one fetched ahead, and a unit's gradient with what it is exchanged into; and what is in no unit
    data_parallel   on the first device: gradients of another one arrive beside its own; each has its part of a lane's samples
    pipeline        a trace a stage (`stages`), which has several lanes' activations at a time; each parameter's gradient joins
                    the sums as soon as it is made
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from train.plan.memory import Kind
from train.plan.trace import Trace

FORECAST = ("single", "ddp", "fsdp", "data_parallel", "pipeline")
_BUCKET = 25 * 2**20  # DDP's bucket_cap_mb


@dataclass(frozen=True)
class Line:
    """The memory of a step as a function of a lane's samples: bytes, by what they are for, of two traces of different size.

    `in_flight` is how many lanes may be between their forward and their backward pass at a time, or within one of them.
    """

    one: Trace
    other: Trace
    in_flight: float = 1

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
            activations=between(one.activations, other.activations),
            held=between(one.held, other.held),
            gradient=one.gradient,
            inputs=between(one.inputs, other.inputs),
            host=one.host,
            largest_unit=one.largest_unit,
            outside_units=one.outside_units,
        )


def needs(mode: str, devices: int, lanes: int, line: Line, micro_batch: int, *, strict: bool) -> Counter[str]:
    """Bytes on the fullest device, or on that of a pipeline's stage, by what they are for, when they are most. `lanes` are those
    of a whole step."""
    traced = line.at(-(-micro_batch // devices) if mode == "data_parallel" else micro_batch)
    own = lanes // devices if mode in ("ddp", "fsdp") else lanes
    passes, update = Counter[str](traced.passes), Counter[str](traced.update)
    for moment in (passes, update):
        moment["activations"] += (own - traced.lanes) * traced.inputs
    if strict:
        passes["gradients"] -= (traced.lanes - 1) * traced.gradient  # the partial sum that the trace has
    if mode == "pipeline":
        moments = [*_passes_of_stage(passes, traced, lanes, line.in_flight, strict=strict), update]
        return max(moments, key=Counter.total)
    passes["partial sums"] = (own.bit_length() - 1) * traced.gradient if strict else 0
    moments = [passes, update]
    if mode == "ddp":
        kept = {kind: traced.update[kind] for kind in ("weights", "optimizer state", "averaged weights")}
        others = max(0, traced.gradient - _BUCKET)
        gradients = {"gradients": traced.gradient, "partial sums": passes["partial sums"], "communication": others}
        moments.append(Counter(kept | gradients))
    return max((_in_mode(moment, mode, devices, traced) for moment in moments), key=Counter.total)


def _passes_of_stage(
    passes: Counter[str], traced: Trace, lanes: int, in_flight: float, *, strict: bool
) -> Iterator[Counter[str]]:
    """The moments at which a stage's passes may take most: backward passes that begin a sum, and those that add to one, in which
    no gradient lies beside it."""

    def besides(done: int) -> Counter[str]:
        """What a pass has besides the traced lane's, after so many backward passes."""
        waiting = int(min(in_flight, lanes - done)) - 1
        sums = done.bit_count() if strict else 0  # of a binary counter
        return Counter({"activations": waiting * traced.held, "partial sums": sums * traced.gradient})

    adding = passes.copy()
    adding["activations"] += traced.activations - traced.passes["activations"]
    adding["gradients"] = 0
    yield passes + max(map(besides, range(0, lanes, 2)), key=Counter.total)
    if strict:
        yield adding + max(map(besides, range(1, lanes, 2)), key=Counter.total)


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
