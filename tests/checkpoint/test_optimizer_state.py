import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from train.errors import RunError
from train.optimizer_state import load_optimizer_state, optimizer_state
from train.weights import cpu_copies, load_model, load_tensors, save_tensors, weights_sha256

torch.set_num_threads(1)

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "fused": True}],
    "AdamW": [{"lr": 0.01, "amsgrad": True}, {"lr": torch.tensor(0.01), "foreach": False}],
    "Adagrad": [{"lr_decay": 0.01}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "NAdam": [{"momentum_decay": 0.1}],
    "ASGD": [{"t0": 2, "lambd": 0.01}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "RAdam": [{}],
    "Adafactor": [{"lr": 0.1}],
    "LBFGS": [{"lr": 0.1, "max_iter": 3, "line_search_fn": "strong_wolfe"}, {"lr": 0.1, "max_iter": 2}],
    "Muon": [{"lr": 0.1}],
    "SparseAdam": [{"lr": 0.1}],
}
CASES = [pytest.param(name, options, id=f"{name}-{i}") for name, all_ in OPTIMIZERS.items() for i, options in enumerate(all_)]


class Images(nn.Module):
    """Convolutions in channels_last, so that the state's memory layout matters too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, step: int) -> Tensor:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(self.head.weight.dtype)
        features = self.conv2(torch.relu(self.conv1(images.to(memory_format=torch.channels_last)))).mean((2, 3))
        out: Tensor = self.head(self.scale * features)
        return (out - 1).square().sum()


class Matrices(nn.Module):
    """What Muon takes, weights with two dimensions, and LBFGS, which cannot view channels_last gradients as flat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))

    def forward(self, step: int) -> Tensor:
        out: Tensor = self.layers(torch.randn(4, 5, generator=torch.Generator().manual_seed(step)))
        return (out - 1).square().sum()


class Words(nn.Module):
    """What SparseAdam takes: sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)

    def forward(self, step: int) -> Tensor:
        words: Tensor = self.embedding(torch.tensor([step % 10, (3 * step) % 10]))
        return (words - 1).square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {"Muon": Matrices, "LBFGS": Matrices, "SparseAdam": Words}


def build(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = MODELS.get(name, Images)().to(dtype)
    options = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
    return model, getattr(torch.optim, name)(model.parameters(), **options)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> str:
    for step in steps:
        optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * 0.9**step  # as the trainer does

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss: Tensor = model(step)
            torch.autograd.backward(loss)
            return loss.item()

        optimizer.step(closure)
    return weights_sha256(model.state_dict())


def through_files(folder: Path, model: nn.Module, optimizer: Optimizer, new: tuple[nn.Module, Optimizer]) -> None:
    tensors, state = optimizer_state(model, optimizer)
    save_tensors(folder / "model.safetensors", cpu_copies(model.state_dict()))
    save_tensors(folder / "optimizer.safetensors", tensors)
    (folder / "state.json").write_text(json.dumps(state))
    load_model(new[0], load_tensors(folder / "model.safetensors"))
    load_optimizer_state(*new, load_tensors(folder / "optimizer.safetensors"), json.loads((folder / "state.json").read_text()))


def test_every_optimizer_of_torch_is_tried_here() -> None:
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    assert classes - {"Optimizer"} == OPTIMIZERS.keys()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_training_goes_on_to_the_same_bits(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    reference = train(*build(name, options), range(9))
    first, second = build(name, options), build(name, options)
    halfway = train(*first, range(5))
    through_files(tmp_path, *first, second)
    assert weights_sha256(second[0].state_dict()) == halfway
    assert train(*second, range(5, 9)) == reference
    if first[1].state_dict()["state"]:  # plain SGD has none
        fresh = build(name, options)
        load_model(fresh[0], load_tensors(tmp_path / "model.safetensors"))
        assert train(*fresh, range(5, 9)) != reference, "the state must matter, or this test shows nothing"


def test_the_options_are_the_new_configurations(tmp_path: Path) -> None:
    first, second = build("AdamW", {"betas": (0.5, 0.6)}), build("AdamW", {"weight_decay": 0.7})
    train(*first, range(2))
    through_files(tmp_path, *first, second)
    (group,) = second[1].param_groups
    assert (group["weight_decay"], group["betas"]) == (0.7, (0.9, 0.999))


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "AdamW", "Adafactor", "SGD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_state_keeps_its_own_dtype_and_layout_whatever_the_parameters(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    options = {**OPTIMIZERS[name][-1]}
    first, second = build(name, options, dtype), build(name, options, dtype)
    train(*first, range(3))
    through_files(tmp_path, *first, second)
    for here, there in zip(first[0].parameters(), second[0].parameters(), strict=True):
        before, after = first[1].state[here], second[1].state[there]
        assert before.keys() == after.keys() != set()
        for key, value in before.items():
            if isinstance(value, Tensor):
                assert (after[key].dtype, after[key].stride()) == (value.dtype, value.stride()), key
                assert torch.equal(after[key], value), key
            else:
                assert after[key] == value, key
    assert train(*second, range(3, 6)) == train(*first, range(3, 6))


def test_values_of_every_kind_survive(tmp_path: Path) -> None:
    model, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}])
    optimizer.state[model.weight] = {
        "count": 2**60,
        "loss": float("inf"),
        "flag": False,
        "buffer": None,
        "history": [torch.ones(3), None, torch.zeros(())],
        "nested": {3: (torch.arange(2), "x")},
    }
    restored = torch.optim.SGD([{"params": [new.weight]}, {"params": [new.bias]}])
    through_files(tmp_path, model, optimizer, (new, restored))
    state = restored.state[new.weight]
    assert [state[key] for key in ("count", "loss", "flag", "buffer")] == [2**60, float("inf"), False, None]
    assert state["history"][0].tolist() == [1, 1, 1]
    assert state["history"][1] is None
    assert state["history"][2].shape == ()
    assert state["nested"][3][0].tolist() == [0, 1]
    assert state["nested"][3][1] == "x"


def test_tensors_are_named_after_their_parameters() -> None:
    model, optimizer = build("AdamW", {})
    train(model, optimizer, range(1))
    tensors, _ = optimizer_state(model, optimizer)
    assert {
        "conv1.weight.exp_avg",
        "conv1.weight.exp_avg_sq",
        "conv1.weight.step",
        "head.bias.exp_avg",
    } <= tensors.keys()
    assert tensors["conv1.weight.exp_avg"].is_contiguous()


def test_state_finds_its_parameter_by_name_when_the_order_has_changed() -> None:
    model, new = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    turned = torch.optim.SGD([new.bias, new.weight], lr=0.1, momentum=0.9)
    load_optimizer_state(new, turned, *optimizer_state(model, optimizer))
    assert turned.state[new.weight]["momentum_buffer"].shape == (3, 3)
    assert torch.equal(turned.state[new.bias]["momentum_buffer"], optimizer.state[model.bias]["momentum_buffer"])


def test_what_was_saved_and_what_is_loaded_share_no_memory_with_the_optimizer() -> None:
    model, optimizer = build("AdamW", {})
    train(model, optimizer, range(2))
    tensors, state = optimizer_state(model, optimizer)
    before = weights_sha256(tensors)
    other = build("AdamW", {})
    load_optimizer_state(*other, tensors, state)
    train(model, optimizer, range(2, 4))
    train(*other, range(2, 4))
    assert weights_sha256(tensors) == before


def test_an_optimizer_of_other_parameters_is_refused_by_name() -> None:
    model, _ = build("SGD", {})
    all_of_it = torch.optim.SGD(model.parameters(), lr=0.1)
    head_only = torch.optim.SGD(model.get_submodule("head").parameters(), lr=0.1)
    two_groups = torch.optim.SGD([{"params": [parameter]} for parameter in (*model.parameters(),)[:2]], lr=0.1)
    with pytest.raises(RunError, match=r"only in the checkpoint: conv1\.bias, conv1\.weight, conv2\.bias, conv2\.weight, scale"):
        load_optimizer_state(model, head_only, *optimizer_state(model, all_of_it))
    with pytest.raises(RunError, match=r"only in this run: conv1\.bias"):
        load_optimizer_state(model, all_of_it, *optimizer_state(model, head_only))
    with pytest.raises(RunError, match="has 2 parameter groups, this run's has 1"):
        load_optimizer_state(model, all_of_it, *optimizer_state(model, two_groups))
