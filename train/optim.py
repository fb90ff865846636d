"""Optimizers by name, and the learning rate as a pure function of the step. The name of an optimizer is one of

    NAME          any of torch.optim but LBFGS and SparseAdam
    torchao/NAME  any of torchao.optim: their state is quantised, block by block, to 8 or 4 bits or to fp8

The other keys of the section `optimizer` are its arguments.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train import config
from train.arguments import check_arguments, check_name
from train.config import Problem
from train.errors import UsageError

# LBFGS calls the loss several times a step; SparseAdam takes only sparse gradients, which lanes cannot sum. torchao's _AdamW is
# for weights that are quantised themselves, and its CPUOffloadOptimizer has states of its own: speed.offload is in its place.
_LEFT_OUT = {"Optimizer", "LBFGS", "SparseAdam", "_AdamW", "CPUOffloadOptimizer"}
_TORCHAO = "torchao/"
_REFUSED_OF_TORCHAO = {
    "amsgrad": "it cannot take the largest of quantised states",
    "bf16_stochastic_round": "it draws random numbers, which would be others in each process",
}


def is_quantised(name: str) -> bool:
    """Whether the named optimizer keeps its state in blocks of few bits."""
    return name.startswith(_TORCHAO)


def check_optimizer(section: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the optimizer's name, its arguments and their values."""
    arguments = {key: value for key, value in section.items() if key not in ("name", "lr", "clip_norm")}
    try:
        optimizer = _find(section["name"])
    except LookupError as error:
        return [Problem("name", str(error))]
    if problems := check_arguments("optimizer", optimizer, arguments, given=("params", "lr")):
        return problems
    if is_quantised(section["name"]) and (refused := [key for key in _REFUSED_OF_TORCHAO if arguments.get(key)]):
        return [Problem(key, f"is not possible with {section['name']}: {_REFUSED_OF_TORCHAO[key]}") for key in refused]
    try:
        _try(optimizer, section["name"], lr=section["lr"], **arguments)
    except (ArithmeticError, AssertionError, TypeError, ValueError, RuntimeError) as error:
        return [Problem("name", f"{section['name']} refuses its arguments: {error}")]
    return []


def _find(name: str) -> Callable[..., Optimizer]:
    """What makes the optimizer; LookupError says why there is none."""
    if is_quantised(name):
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao registers with torch what torch knows by now
        try:
            from torchao import optim
        except ImportError as error:
            raise LookupError(f"{name} needs torchao: pip install 'lockstep[torchao]'") from error
        known, also = _optimizers(optim, _TORCHAO), ""
    else:
        known, also = _optimizers(torch.optim), "those of torchao.optim, such as torchao/AdamW8bit"
    if problems := check_name(name, known, "optimizer", also):
        raise LookupError(problems[0].message)
    return known[name]


def _optimizers(module: ModuleType, prefix: str = "") -> dict[str, Callable[..., Optimizer]]:
    return {
        prefix + name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and name not in _LEFT_OUT
    }


def _try(make: Callable[..., Optimizer], name: str, **arguments: Any) -> None:
    """Make the optimizer for one small matrix; one of torchao looks at its arguments only in a step."""
    matrix = nn.Parameter(torch.zeros(64, 64))
    optimizer = make([matrix], **arguments)
    if is_quantised(name):
        matrix.grad = torch.zeros_like(matrix)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()


def build_optimizer(section: config.Optimizer, model: nn.Module, *, lists: bool = True, compiled: bool = False) -> Optimizer:
    """The named optimizer over the parameters that are trained; without `lists` it updates one after the other.

    torchao compiles its update for each shape of weights. On a CPU that takes minutes and is done only where the run is
    `compiled`.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = _find(section.name)
        if not lists and section.arguments.get("fused"):
            raise UsageError("optimizer.fused: true is not possible where some layers are cut over processes; leave it out")
        one_by_one = not lists and "foreach" in inspect.signature(optimizer).parameters
        made = optimizer(parameters, lr=section.lr, **section.arguments | ({"foreach": False} if one_by_one else {}))
    except ValueError as error:  # such as Muon's: only matrices
        raise UsageError(f"optimizer.name: {section.name} cannot train this model: {error}") from error
    if is_quantised(section.name):
        from train.parallel.launch import precisions

        devices = {parameter.device.type for parameter in parameters}
        if "cuda" in devices and section.name.endswith("Fp8") and "fp8" not in precisions():
            raise UsageError(
                f"optimizer.name: {section.name} needs a GPU with fp8; torchao/AdamW8bit and AdamW4bit run on this one"
            )
        if devices == {"cpu"} and not compiled:
            made.step = torch.compiler.set_stance("force_eager")(made.step)  # type: ignore[method-assign]
    return made


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # torchao would compile a number into its update
        else:
            group["lr"] = rate


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
