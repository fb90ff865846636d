import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from train.errors import RunError
from train.weights import cpu_copies, load_model, load_tensors, save_tensors, weights_sha256


def test_the_hash_is_sha256_over_names_and_little_endian_bytes_in_name_order() -> None:
    tensors = {
        "b.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),  # C order of the transpose: 1, 3, 2, 4
        "a": torch.tensor(0.5, dtype=torch.bfloat16),  # 0x3f00
        "é": torch.tensor([1.0], dtype=torch.float64),
        "count": torch.tensor(7),  # not floating point: left out
        "empty": torch.empty(0, 3),
    }
    by_hand = (
        b"a\0\x00\x3f" + b"b.weight\0" + struct.pack("<4f", 1, 3, 2, 4) + b"empty\0" + "é".encode() + b"\0" + struct.pack("<d", 1)
    )
    assert weights_sha256(tensors) == hashlib.sha256(by_hand).hexdigest()


def test_the_hash_depends_on_neither_memory_layout_nor_order_of_the_names() -> None:
    weight, bias = torch.randn(4, 3, 5, 5), torch.randn(4)
    laid_out = {"bias": bias, "weight": weight.to(memory_format=torch.channels_last)}
    assert weights_sha256(laid_out) == weights_sha256({"weight": weight, "bias": bias})
    assert weights_sha256({"weight": weight, "bias": bias.nextafter(torch.tensor(9.0))}) != weights_sha256(laid_out)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_and_channels_last_weights_survive_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Tied()).to(memory_format=torch.channels_last)
    with torch.no_grad():  # numbers that are not the new model's own by chance
        for parameter in model.parameters():
            parameter.normal_()
    save_tensors(tmp_path / "model.safetensors", cpu_copies(model.state_dict()))
    conv, tied = nn.Conv2d(3, 4, 3), Tied()
    restored = nn.Sequential(conv, tied).to(memory_format=torch.channels_last)
    load_model(restored, load_tensors(tmp_path / "model.safetensors"))
    assert weights_sha256(restored.state_dict()) == weights_sha256(model.state_dict())
    assert tied.head.weight is tied.embedding.weight
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool],
    ids=str,
)
def test_every_dtype_and_also_scalars_and_empty_tensors_survive_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    save_tensors(tmp_path / "x.safetensors", tensors)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].float(), tensor.float())


def test_copies_do_not_change_when_training_goes_on() -> None:
    model = nn.Linear(2, 2)
    copies = cpu_copies(model.state_dict())
    before = weights_sha256(copies)
    with torch.no_grad():
        model.weight.add_(1)
    assert weights_sha256(copies) == before != weights_sha256(model.state_dict())


def test_a_file_is_readable_by_whom_the_umask_allows(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        save_tensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(previous)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"a": torch.arange(100_000)})
    loaded = load_tensors(path)["a"]
    with path.open("r+b") as file:  # as a crash or a careless hand would, in place
        file.truncate(0)
    assert loaded.sum() == 100_000 * 99_999 // 2


def test_weights_of_another_model_are_refused_with_every_difference_and_both_shapes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = weights_sha256(model.state_dict())
    tensors = {
        "0.weight": torch.ones(4, 3),
        "0.bias": torch.ones(5),
        "1.weight": torch.ones(2, 4),
        "head": torch.ones(9),
    }
    with pytest.raises(RunError) as refusal:
        load_model(model, tensors)
    message = str(refusal.value)
    assert "missing in the file: 1.bias [2]" in message
    assert "not in the model: head [9]" in message
    assert "0.bias is [5] in the file, [4] in the model" in message
    assert "1.weight" not in message
    assert weights_sha256(model.state_dict()) == before, "nothing may be loaded when something does not fit"


def test_a_long_list_of_differences_is_shortened() -> None:
    with pytest.raises(RunError, match=r"layer7 \[1\] and 92 more") as refusal:
        load_model(nn.Linear(1, 1), {f"layer{index}": torch.ones(1) for index in range(100)})
    assert len(str(refusal.value)) < 1000


class Bomb:
    """What an attacker plants: unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("pickled", [pickle.dump, torch.save])
def test_a_pickle_in_the_place_of_weights_is_refused_and_not_run(tmp_path: Path, pickled: Callable[..., None]) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        pickled(Bomb(tmp_path / "harm"), file)
    with pytest.raises(RunError, match="not a readable safetensors file"):
        load_tensors(path)
    assert not (tmp_path / "harm").exists()
    with path.open("rb") as file:
        pickle.load(file) if pickled is pickle.dump else torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists(), "the bomb must be a real one"


@pytest.mark.parametrize("size", [None, 0, 5, -1])
def test_a_file_that_is_gone_or_cut_is_an_error_in_words(tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"a": torch.ones(3)})
    if size is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunError, match=r"model\.safetensors"):
        load_tensors(path)
