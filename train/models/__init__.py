"""Models by name. A name is one of

    NAME                 a file of this folder, train/models/NAME.py: its function or class `model`; _NAME.py is none
    torchvision/NAME     any classifier of torchvision.models
    package.module:NAME  anything importable that makes a torch.nn.Module

To add a family, add a file. `model` takes what the task and its data give, `classes` and `channels` of pictures, `vocabulary`
and `context` of text, and arguments of its own, which the config's `model` section gives.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from train import config
from train.arguments import check_arguments, check_name, imported
from train.config import Problem
from train.errors import UsageError

_GIVEN = ("classes", "channels", "num_classes", "vocabulary", "context")  # by the tasks


def own_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]


def check(section: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the model's name and arguments."""
    arguments = {key: value for key, value in section.items() if key != "name"}
    try:
        make = _find(section["name"])
    except LookupError as error:
        return [Problem("name", str(error))]
    return check_arguments("model", make, arguments, given=_GIVEN)


def build(section: config.Model, given: Mapping[str, int]) -> nn.Module:
    """The named model with fresh weights, for what the task gives."""
    make = _find(section.name)
    parameters = inspect.signature(make).parameters
    of_torchvision = section.name.startswith("torchvision/")  # whose signatures name no classes
    known = {"num_classes"} if of_torchvision else set(_GIVEN) & parameters.keys()
    needed = known if of_torchvision else {name for name in known if parameters[name].default is inspect.Parameter.empty}
    if missing := sorted(needed - given.keys()):
        raise UsageError(f"model.name: {section.name} is built with {', '.join(missing)}, of which this task knows nothing")
    if of_torchvision and given["channels"] != 3:
        raise UsageError(f"model.name: {section.name} looks at colour pictures; set data.image.mode to RGB")
    offered = {name: value for name, value in given.items() if name in known}
    try:
        return make(**offered, **section.arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"model: {section.name} cannot be built with {section.arguments or 'its defaults'}: {error}") from error


def _find(name: str) -> Callable[..., nn.Module]:
    """What makes the model; LookupError says why there is none."""
    if ":" in name:
        return imported(name)
    if name.startswith("torchvision/"):
        from torchvision import models

        known = [f"torchvision/{found}" for found in models.list_models(module=models)]
        if problems := check_name(name, known, "model"):
            raise LookupError(problems[0].message)
        builder: Callable[..., nn.Module] = models.get_model_builder(name.removeprefix("torchvision/"))
        return builder
    if problems := check_name(name, own_names(), "model", also="torchvision/NAME and package.module:NAME"):
        raise LookupError(problems[0].message)
    return imported(f"{__name__}.{name}:model")
