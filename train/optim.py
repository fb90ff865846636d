"""Optimizers of torch.optim by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from train import config
from train.arguments import check_arguments, check_name
from train.config import Problem
from train.errors import UsageError

# LBFGS calls the loss several times a step; SparseAdam takes only sparse gradients, which lanes cannot sum.
_LEFT_OUT = {"Optimizer", "LBFGS", "SparseAdam"}


def names() -> dict[str, Callable[..., Optimizer]]:
    return {
        name: value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and name not in _LEFT_OUT
    }


def check_optimizer(section: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the optimizer's name, its arguments and their values."""
    arguments = {key: value for key, value in section.items() if key not in ("name", "lr", "clip_norm")}
    known = names()
    problems = check_name(section["name"], known, "optimizer")
    if not problems:
        problems = check_arguments("optimizer", known[section["name"]], arguments, given=("params", "lr"))
    if not problems:
        try:
            known[section["name"]]([torch.nn.Parameter(torch.zeros(1, 1))], lr=section["lr"], **arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            problems = [Problem("name", f"{section['name']} refuses its arguments: {error}")]
    return problems


def build_optimizer(section: config.Optimizer, model: nn.Module, *, lists: bool = True) -> Optimizer:
    """The named optimizer over the parameters that are trained; without `lists` it updates one after the other."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = names()[section.name]
        if not lists and section.arguments.get("fused"):
            raise UsageError("optimizer.fused: true is not possible where some layers are cut over processes; leave it out")
        one_by_one = not lists and "foreach" in inspect.signature(optimizer).parameters
        return optimizer(parameters, lr=section.lr, **section.arguments | ({"foreach": False} if one_by_one else {}))
    except ValueError as error:  # such as Muon's: only matrices
        raise UsageError(f"optimizer.name: {section.name} cannot train this model: {error}") from error


def _constant(done: float) -> float:
    return 1.0


def _linear(done: float, *, final: float = 0.0) -> float:
    return 1.0 + (final - 1.0) * done


def _cosine(done: float, *, final: float = 0.0) -> float:
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2.0


def _step(step: int, *, every: int, gamma: float = 0.1) -> float:
    return float(gamma ** (step // every))


def _one_cycle(done: float, *, rise: float = 0.3, initial: float = 0.04, final: float = 4e-6) -> float:
    """Smith's one cycle: a cosine up from `initial` over the share `rise` of the run, and a cosine down to `final`."""
    if done < rise:
        return 1.0 + (initial - 1.0) * (1.0 + math.cos(math.pi * done / rise)) / 2.0
    return _cosine((done - rise) / (1.0 - rise), final=final)


_SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
    "one_cycle": _one_cycle,
}


def check_schedule(section: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the schedule's arguments."""
    arguments = {key: value for key, value in section.items() if key not in ("name", "warmup")}
    problems = check_arguments("schedule", _SCHEDULES[section["name"]], arguments, given=("done", "step"))
    for key, value in arguments.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            problems.append(Problem(key, f"must be a number of at least 0, not {value!r}"))
        elif key == "every" and (not isinstance(value, int) or value < 1):
            problems.append(Problem(key, f"must be a whole number of steps of at least 1, not {value!r}"))
        elif key == "rise" and not 0 < value < 1:
            problems.append(Problem(key, f"must lie between 0 and 1, not {value!r}"))
    return problems


def learning_rate(optimizer: config.Optimizer, schedule: config.Schedule, step: int, *, warmup: int, total: int) -> float:
    """The learning rate of the step that follows `step` finished ones, in a run of `total` steps.

    It rises from lr/(warmup + 1) over `warmup` steps, and the last step has the schedule's final value.
    """
    if step < warmup:
        return optimizer.lr * (step + 1) / (warmup + 1)
    shape = _SCHEDULES[schedule.name]
    if schedule.name == "step":
        return optimizer.lr * shape(step - warmup, **schedule.arguments)
    done = (step - warmup) / max(total - 1 - warmup, 1)
    return optimizer.lr * shape(min(done, 1.0), **schedule.arguments)
