"""What the `speed` section asks for beyond the launcher: precision, compiler, memory layout, attention kernels, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from train.config import Switches
from train.errors import UsageError
from train.parallel.launch import Launch
from train.parallel.units import units

_AUTOCAST = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}  # Accelerate's mixed_precision for each
_ATTENTION = {"cpu": ("flash", "math"), "cuda": ("flash", "efficient", "cudnn", "math")}


def over(launch: Launch, speed: Switches) -> Launch:
    """The launcher's facts with what the configuration says in place of its own."""
    precision = launch.precision if speed.precision == "auto" else _AUTOCAST[speed.precision]
    if speed.compile == "auto":
        return replace(launch, precision=precision)
    compiler = "no" if speed.compile == "off" else "inductor"
    return replace(launch, precision=precision, compiler=compiler, blocks=speed.compile == "blocks")


def problems(launch: Launch, speed: Switches, device: str) -> list[str]:
    """What the launcher or the device does not go together with."""
    found = []
    if speed.precision != "auto":
        if launch.precision not in ("no", _AUTOCAST[speed.precision]):
            found.append(
                f"speed.precision: {speed.precision} was asked for, and mixed_precision: {launch.precision} of accelerate; take "
                "one of them out"
            )
        possible = ("fp32", *launch.precisions) if device == "cuda" else ("fp32", "bf16")
        if speed.precision not in possible:
            found.append(f"speed.precision: {speed.precision} is not possible on this device; {', '.join(possible)} are")
    if speed.attention != "auto" and speed.attention not in _ATTENTION[device]:
        found.append(f"speed.attention: {speed.attention} does not run on {device}; {', '.join(_ATTENTION[device])} do")
    if speed.cuda_graphs and (device != "cuda" or over(launch, speed).compiler != "inductor"):
        found.append("speed.cuda_graphs: CUDA graphs are made of compiled kernels on a GPU; set speed.compile: model")
    if speed.offload != "off" and device == "cpu":
        found.append(
            "speed.offload: the state of an optimizer on the CPU is in the host's memory already; set speed.offload: off"
        )
    return found


def accelerator_options(speed: Switches) -> dict[str, Any]:
    """The arguments of an Accelerator that say so in place of the launcher. It compiles nothing: it would compile what wraps
    the model too, which is another one on several processes, with other sums; see `fit`."""
    from accelerate.utils import TorchDynamoPlugin

    precision = {} if speed.precision == "auto" else {"mixed_precision": _AUTOCAST[speed.precision]}
    return {"dynamo_plugin": TorchDynamoPlugin(backend="no"), **precision}


def set_kernels(speed: Switches) -> None:
    """Choose this process's kernels of matrix products and of attention."""
    if speed.precision != "auto":
        cudnn: Any = torch.backends.cudnn
        for backend in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            backend.fp32_precision = "tf32" if speed.precision == "tf32" else "ieee"
    if speed.attention != "auto":
        cuda = torch.backends.cuda
        kernels = {
            "flash": cuda.enable_flash_sdp,
            "efficient": cuda.enable_mem_efficient_sdp,
            "cudnn": cuda.enable_cudnn_sdp,
            "math": cuda.enable_math_sdp,
        }
        for name, enable in kernels.items():
            enable(name == speed.attention)


def lay_out(model: nn.Module, speed: Switches) -> None:
    if speed.channels_last:
        model.to(memory_format=torch.channels_last)


def fit(model: nn.Module, speed: Switches, launch: Launch) -> None:
    """Change how the passes of `model` are computed, and nothing of what its parts are called or hold."""
    if speed.precision == "fp8":
        _compute_in_fp8(model)
    for module in _chosen(model, speed.recompute):
        _recompute(module)
    if launch.compiler != "no":
        _compile(model, speed, launch)


def _compile(model: nn.Module, speed: Switches, launch: Launch) -> None:
    """Each part's `forward` alone, without the hooks by which DDP, FSDP and recomputation work."""
    from accelerate.utils import TorchDynamoPlugin

    mode = "reduce-overhead" if speed.cuda_graphs else None
    options = TorchDynamoPlugin(backend=launch.compiler, mode=mode).to_kwargs()  # the rest is the launcher's
    for part in units(model) if launch.blocks else [model]:
        part.forward = torch.compile(part.forward, **options)


def _compute_in_fp8(model: nn.Module) -> None:
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise UsageError("speed.precision: fp8 needs torchao: pip install 'lockstep[torchao]'") from error

    def fits(module: nn.Module, name: str) -> bool:
        """Tensor cores take multiples of 16."""
        return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0

    convert_to_float8_training(model, module_filter_fn=fits)


def _chosen(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The modules that the patterns name, each pattern at least one; those within one that is named too are left out."""
    modules = {name: module for name, module in model.named_modules() if name}
    matches = {pattern: [name for name in modules if fnmatchcase(name, pattern)] for pattern in patterns}
    if unknown := [pattern for pattern, found in matches.items() if not found]:
        known = ", ".join(name for name, _ in model.named_children())
        raise UsageError(
            f"speed.recompute: the model has no module {', '.join(unknown)}; its parts are {known}, and those below them"
        )
    names = {name for found in matches.values() for name in found}
    return [modules[name] for name in modules if name in names and not any(name.startswith(f"{other}.") for other in names)]


def _recompute(module: nn.Module) -> None:
    """Keep of a module's activations its inputs alone, and compute the others again in the backward pass, with the same bits."""
    from torch.distributed._composable import checkpoint

    checkpoint(module, context_fn=lambda: (nullcontext(), _statistics_kept(module)))


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """A second forward pass of the same samples must not move BatchNorm's running statistics a second time."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # behind the back of autograd, as the passes are still under way
