"""The parts of a model that are sharded or compiled one by one."""

from __future__ import annotations

from typing import Any

from torch import nn


def units(model: nn.Module, wanted: Any = None) -> list[nn.Module]:
    """The modules that the policy `wanted` picks, else the model's children, and the children of those that are only a list of
    others."""
    if wanted is not None:
        return [module for module in model.modules() if module is not model and wanted(module)][::-1]
    lists = (nn.Sequential, nn.ModuleList)
    inner = [unit for child in model.children() for unit in (child.children() if isinstance(child, lists) else [child])]
    return [unit for unit in inner if next(unit.parameters(), None) is not None]
