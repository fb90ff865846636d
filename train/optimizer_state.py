"""An optimizer's state as named tensors and JSON, so that it loads to the same bits and without a pickle."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import transform_subclass

from train.errors import RunError
from train.weights import as_sharded, cpu_copy


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, copy: Callable[[Tensor], Tensor] = cpu_copy
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors (CPU copies, such as `conv1.weight.exp_avg`) and the rest as JSON values.

    `model` is the unwrapped model: its parameter names are the keys. Parameters that lie on another process are left to it.
    """
    state = optimizer.state_dict()
    groups = _group_names(model, optimizer)
    names = {
        number: name
        for group, in_group in zip(state["param_groups"], groups, strict=True)
        for number, name in zip(group["params"], in_group, strict=True)
    }
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    tensors: dict[str, Tensor] = {}
    packed = {
        "state": {
            names[number]: {key: _pack(value, f"{names[number]}.{key}", tensors, copy) for key, value in values.items()}
            for number, values in state["state"].items()
            if names[number] in here
        },
        "groups": groups,
    }
    return tensors, packed


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, Any],
    keep: Callable[[Tensor], None] = lambda parameter: None,
) -> None:
    """Put back what `optimizer_state` gave, and `keep` each parameter's before the next one's is put on the device.

    Raises RunError when the groups hold other parameters now.
    """
    groups = _group_names(model, optimizer)
    _check_groups(packed["groups"], groups)
    # `load_state_dict` knows parameters by their place in the optimizer as it is now.
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    parameters = dict(model.named_parameters())
    here = {name: values for name, values in packed["state"].items() if not parameters[name].is_meta}
    state = {
        name: {key: _unpack(value, tensors, parameters[name]) for key, value in values.items()} for name, values in here.items()
    }
    param_groups = [
        {
            **now,  # the configuration's, which `resume` has compared with the checkpoint's
            "params": [numbers[name] for name in names],
        }
        for now, names in zip(optimizer.param_groups, groups, strict=True)
    ]
    # It chooses the right device for each tensor, but would round it to the parameter's dtype (a float32 running product
    # to bfloat16) and forget the memory layout, which kernels' bits depend on: let it choose for empty ones.
    places = {numbers[name]: _empty(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": places, "param_groups": param_groups})
    for name, values in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = _exact(values, optimizer.state[parameter], parameter)
        keep(parameter)


def _group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _check_groups(saved: list[list[str]], now: list[list[str]]) -> None:
    if len(saved) != len(now):
        raise RunError(
            f"The checkpoint's optimizer has {len(saved)} parameter groups, this run's has {len(now)}. "
            "Use the optimizer's options of the run that saved it."
        )
    lines = [
        f"  group {index}: {kind}: {', '.join(sorted(names)[:8])}{' ...' if len(names) > 8 else ''}"
        for index, (then, here) in enumerate(zip(saved, now, strict=True))
        for kind, names in (
            ("only in the checkpoint", set(then) - set(here)),
            ("only in this run", set(here) - set(then)),
        )
        if names
    ]
    if lines:
        raise RunError(
            "The checkpoint's optimizer holds other parameters than this run's:\n"
            + "\n".join(lines)
            + "\nUse the model and the optimizer's options of the run that saved it."
        )


def _pack(value: Any, name: str, tensors: dict[str, Tensor], copy: Callable[[Tensor], Tensor]) -> Any:
    """JSON for one value, with each tensor put into `tensors` and named in its place."""
    if isinstance(value, _quantised()):
        kept, facts = value.__tensor_flatten__()
        inner = {part: getattr(value, part) for part in kept}
        packed = {key: _pack(item, name, tensors, copy) for key, item in (("parts", inner), ("facts", facts))}
        return {"quantised": type(value).__name__, **packed}
    if isinstance(value, Tensor):
        tensors[name] = copy(value)
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(item, f"{name}.{key}", tensors, copy)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{name}.{index}", tensors, copy) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    return value


def _unpack(value: Any, tensors: Mapping[str, Tensor], parameter: Tensor) -> Any:
    """The value; a tensor of the parameter's shape sharded as that is."""
    match value:
        case {"tensor": str(name)}:
            tensor = tensors[name]
            return as_sharded(tensor, parameter) if tensor.shape == parameter.shape else tensor
        case {"quantised": str(kind), "parts": parts, "facts": facts}:
            [known] = [known for known in _quantised() if known.__name__ == kind]
            return known.__tensor_unflatten__(_unpack(parts, tensors, parameter), _unpack(facts, tensors, parameter))
        case {"dtype": str(name)}:
            return getattr(torch, name)
        case {"dict": list(items)}:
            return {key: _unpack(item, tensors, parameter) for key, item in items}
        case {"tuple": list(items)}:
            return tuple(_unpack(item, tensors, parameter) for item in items)
        case list(items):
            return [_unpack(item, tensors, parameter) for item in items]
        case _:
            return value


def _quantised() -> tuple[Any, ...]:
    """The kinds of tensors in which an optimizer of torchao keeps its state; none where it has not been imported."""
    adam = sys.modules.get("torchao.optim.adam")
    return (adam.OptimState8bit, adam.OptimState4bit, adam.OptimStateFp8) if adam else ()


def _empty(saved: Any) -> Any:
    """The same with tensors that take no memory."""
    if isinstance(saved, Tensor):
        return torch.empty(0)
    if isinstance(saved, dict):
        return {key: _empty(item) for key, item in saved.items()}
    return type(saved)(map(_empty, saved)) if isinstance(saved, list | tuple) else saved


def _exact(saved: Any, loaded: Any, parameter: Tensor) -> Any:
    """`saved` with its own dtype, on the device of `loaded`, in the parameter's memory layout where shapes agree."""
    if isinstance(saved, _quantised()):
        return transform_subclass(saved, lambda _, part: part.to(loaded.device, copy=True))
    if isinstance(saved, Tensor):
        like = parameter if saved.shape == parameter.shape else saved
        return torch.empty_like(like, dtype=saved.dtype, device=loaded.device, requires_grad=False).copy_(saved)
    if isinstance(saved, dict):
        return {key: _exact(item, loaded[key], parameter) for key, item in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_exact(item, there, parameter) for item, there in zip(saved, loaded, strict=True))
    return saved
