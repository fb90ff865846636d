"""Named tensors: copying them off the device, safetensors files, loading them into a model, and their hash."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from train.errors import RunError

_LISTED = 8  # names shown of each kind when weights do not fit a model


Spare = dict[tuple[torch.Size, torch.dtype], list[Tensor]]


def spare(tensors: Iterable[Tensor]) -> Spare:
    """The memory of copies that nobody needs any more, for the next ones: fresh memory takes four times as long as copying."""
    found: Spare = {}
    for tensor in tensors:
        found.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    return found


def cpu_copies(tensors: Mapping[str, Tensor], into: Spare | None = None) -> dict[str, Tensor]:
    """Copies in C order that share no memory with the originals or with each other; of a model's tensors those that lie here.

    So training may go on while they are written, and tied or channels-last tensors can be saved like any others.
    """
    return {name: cpu_copy(tensor, into) for name, tensor in tensors.items() if not tensor.is_meta}


def part_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, but of a sharded tensor only this process's part of it."""
    return {name: part_copy(tensor) for name, tensor in tensors.items() if not tensor.is_meta}


def cpu_copy(tensor: Tensor, into: Spare | None = None) -> Tensor:
    """The whole of a sharded tensor: all processes must ask for it."""
    whole = tensor.detach()
    if hasattr(whole, "full_tensor"):
        whole = whole.full_tensor()
    if into and (fitting := into.get((whole.shape, whole.dtype))):
        return fitting.pop().copy_(whole)
    return whole.to("cpu", copy=True, memory_format=torch.contiguous_format)


def part_copy(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies here, as one that knows which part it is."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return cpu_copy(tensor)
    stager = DefaultStager(
        StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
    )
    staged = stager.stage({"": tensor.detach()})
    assert isinstance(staged, dict)
    part: Tensor = staged[""]
    return part


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the memory of this one: a sharded one's part here, a quantised one's codes and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts(getattr(tensor, name))]


def as_sharded(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which all processes have, cut as `like` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError when the disk refuses."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    path.chmod(mode)  # safetensors makes its file readable by the owner alone, whatever the umask


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into memory of our own, which the file's removal cannot take away.

    Raises RunError for anything else than a safetensors file; nothing in it is ever executed.
    """
    try:
        return dict(load_file(path, backend="pread"))
    except (SafetensorError, OSError) as error:
        raise RunError(
            f"{path} is not a readable safetensors file: {error}\n"
            "Only safetensors files are read, because a pickle (.pt, .bin) can run code. Take another checkpoint."
        ) from error


def load_parts(folder: Path) -> dict[str, Tensor]:
    """Read what `torch.distributed.checkpoint` has written into a folder of safetensors files, each tensor as a whole.

    Raises RunError where that cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata.items()
        tensors = {
            name: torch.empty(part.size, dtype=part.properties.dtype)
            for name, part in found
            if isinstance(part, TensorStorageMetadata)
        }
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except (SafetensorError, dcp.CheckpointException, OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder} does not hold readable safetensors files: {error}. Take another checkpoint.") from error
    return tensors


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the model's parameters and buffers, all of them or, with a RunError, none."""
    wanted = model.state_dict()
    missing = [f"{name} {_shape(wanted[name])}" for name in wanted if name not in tensors]
    extra = [f"{name} {_shape(tensors[name])}" for name in tensors if name not in wanted]
    reshaped = [
        f"{name} is {_shape(tensors[name])} in the file, {_shape(wanted[name])} in the model"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    problems = {"missing in the file": missing, "not in the model": extra, "of another shape": reshaped}
    if any(problems.values()):
        listing = "\n".join(f"  {kind}: {_shortened(names)}" for kind, names in problems.items() if names)
        raise RunError(
            f"The weights do not fit the model {type(model).__name__}:\n{listing}\n"
            "They were saved from another model: set the model's options to those of the run that saved them."
        )
    here = {name: as_sharded(tensors[name], like) for name, like in wanted.items() if not like.is_meta}
    model.load_state_dict(here, strict=False)  # what lies on another process is loaded there


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the floating-point tensors sorted by name: the name in UTF-8, a zero byte, the bytes.

    The bytes are little-endian in C order, so that the hash depends on neither device nor memory layout.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():
            digest.update(name.encode() + b"\0")
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _shortened(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
