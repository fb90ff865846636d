"""The parts of a model as a configuration names them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from train.errors import UsageError


def refuse_unknown(model: nn.Module, names: Sequence[str], key: str) -> None:
    """UsageError for names that are no modules of the model, all at once."""
    modules = dict(model.named_modules())
    if unknown := [name for name in names if name not in modules]:
        raise UsageError("\n".join(unknown_module(name, modules, key) for name in unknown))


def tied(model: nn.Module) -> list[str]:
    """The weights that lie in several places, by their names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [" and ".join(same) for same in names.values() if len(same) > 1]


def unknown_module(name: str, modules: dict[str, nn.Module], key: str) -> str:
    near = get_close_matches(name, modules, n=1)
    top = ", ".join(known for known in modules if known and "." not in known)
    question = f"; did you mean {near[0]}?" if near else ""
    return f"{key}: the model has no module {name}{question} (its parts: {top}; and those within them)"
