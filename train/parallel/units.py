"""The parts of a model that are sharded or compiled one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn


def units(model: nn.Module, wanted: Any = None) -> list[nn.Module]:
    """The modules that the policy `wanted` picks, else the model's children, and the children of those that are only a list of
    others; without those that share a weight with another module, which is the whole model's."""
    if wanted is not None:
        inner = [module for module in model.modules() if module is not model and wanted(module)][::-1]
    else:
        lists = (nn.Sequential, nn.ModuleList)
        inner = [unit for child in model.children() for unit in (child.children() if isinstance(child, lists) else [child])]
    places = Counter(map(id, (parameter for _, parameter in model.named_parameters(remove_duplicate=False))))
    return [
        unit
        for unit in inner
        if (own := Counter(map(id, (parameter for _, parameter in unit.named_parameters(remove_duplicate=False)))))
        and all(places[weight] == count for weight, count in own.items())
    ]
