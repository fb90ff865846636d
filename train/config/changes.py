"""What differs between two configurations, and which differences a resume accepts."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from train.config import values
from train.config.effects import Effect
from train.config.schema import MOVABLE, Config, effect, flatten

# What a change of a key, or of a section, would change in steps that are still to come.
CONSEQUENCES = {
    "run.seed": "the order of the samples and all random numbers",
    "run.determinism": "the kernels, and with them the rounding of every sum",
    "run.threads": "the order in which sums are added on the CPU",
    "data": "which samples are read, or their order",
    "data.image": "what the model is shown",
    "data.transforms": "what the model is shown",
    "task": "what is learned",
    "model": "the weights, which the saved ones would not fit",
    "batch.size": "which samples a step has, so that the saved position means another step",
    "batch.lanes": "the random numbers of each sample and the order in which gradients are added",
    "optimizer": "the updates of the weights",
    "schedule": "the learning rate",
    "ema": "the averaged weights",
    "speed": "the kernels, and with them the rounding of every sum",
}


# Keys that older checkpoints and receipts have, and that changed no number.
RETIRED = ("tracking.trace",)


def recorded(content: Mapping[str, Any]) -> Config:
    """The configuration in a checkpoint or a receipt, which an older program may have written."""
    kept: dict[str, Any] = copy.deepcopy(dict(content))
    for key in RETIRED:
        section, _, name = key.partition(".")
        kept[section].pop(name, None)
    return Config.model_validate(kept)


class Difference(NamedTuple):
    """A key with its two values as JSON has them; None also where an argument is not given."""

    key: str
    old: Any
    new: Any
    effect: Effect


def differences(old: Config, new: Config) -> list[Difference]:
    before, after = flatten(old), flatten(new)
    changed = [key for key in before | after if (key in before, before.get(key)) != (key in after, after.get(key))]
    return [Difference(key, before.get(key), after.get(key), effect(key) or Effect.NUMBERS) for key in changed]


def verdict(difference: Difference, new: Config) -> str | None:
    """None when a resume under `new` may go on with the difference, else the reason it may not."""
    key = difference.key
    sections = [key[:end] for end, sign in enumerate(key) if sign == "."]
    if not {key, *sections}.isdisjoint(new.run.allow_changes):
        return None
    if key in MOVABLE and values.without_machine(difference.old) == values.without_machine(difference.new):
        return None  # the same data in another place, as far as a name tells; what lies there is compared when it is opened
    if difference.effect == Effect.NUMBERS:
        known = next(name for name in (key, *reversed(sections)) if name in CONSEQUENCES)
        return f"it changes {CONSEQUENCES[known]}"
    if key in ("steps", "epochs") and new.schedule.depends_on_length:
        return f"schedule {new.schedule.name} would have given the steps already done another learning rate"
    return None
