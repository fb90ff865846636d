"""The state of torchao's optimizers, whose tensors are codes with scales, goes through files to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.checkpoint.test_optimizer_state import through_files
from train import config
from train.optim import build_optimizer, set_learning_rate
from train.optimizer_state import load_optimizer_state, optimizer_state
from train.weights import parts, weights_sha256

QUANTISED = ["Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"]


class Net(nn.Module):
    """Weights large enough to be quantised, in channels_last and not, and others that are too small or do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3)
        self.uneven = nn.Linear(64, 65)  # 4,160 values, of no whole number of blocks
        self.head = nn.Linear(65, 64)
        self.wide = nn.Linear(64, 128)
        self.to(memory_format=torch.channels_last)

    def forward(self, step: int) -> Tensor:
        pictures = torch.randn(2, 64, 3, 3, generator=torch.Generator().manual_seed(step))
        features = torch.relu(self.conv(pictures)).mean((2, 3))
        out: Tensor = self.wide(self.head(self.uneven(features)))
        return (out - 1).square().sum()


def build(name: str, **arguments: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, build_optimizer(config.Optimizer(name=name, lr=0.01, **arguments), model)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> str:
    for step in steps:
        set_learning_rate(optimizer, 0.01 * 0.9**step)
        optimizer.zero_grad()
        torch.autograd.backward(model(step))
        optimizer.step()
    return weights_sha256(model.state_dict())


@pytest.mark.parametrize("name", QUANTISED)
def test_training_goes_on_to_the_same_bits(tmp_path: Path, name: str) -> None:
    reference = train(*build(f"torchao/{name}"), range(6))
    first, second = build(f"torchao/{name}"), build(f"torchao/{name}")
    train(*first, range(3))
    through_files(tmp_path, *first, second)
    for here, there in zip(first[0].parameters(), second[0].parameters(), strict=True):
        for key, value in first[1].state[here].items():
            loaded = second[1].state[there][key]
            assert type(loaded) is type(value), key
            for then, now in zip(parts(value), parts(loaded), strict=True):
                assert torch.equal(then.reshape(-1).view(torch.uint8), now.reshape(-1).view(torch.uint8)), key
                assert (then.dtype, then.stride()) == (now.dtype, now.stride()), key
    assert train(*second, range(3, 6)) == reference


def test_what_was_saved_and_what_is_loaded_share_no_memory_with_the_optimizer() -> None:
    first, other = build("torchao/AdamW8bit"), build("torchao/AdamW8bit")
    train(*first, range(2))
    tensors, state = optimizer_state(*first)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    load_optimizer_state(*other, tensors, state)
    train(*first, range(2, 4))
    train(*other, range(2, 4))
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_checkpoint_names_codes_and_scales() -> None:
    model, optimizer = build("torchao/AdamW8bit")
    train(model, optimizer, range(1))
    tensors, _ = optimizer_state(model, optimizer)
    assert tensors["conv.weight.exp_avg.codes"].dtype == torch.uint8
    assert tensors["conv.weight.exp_avg.scale"].shape == (64 * 64 * 9 / 256,)
    assert tensors["uneven.weight.exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(("name", "bits", "block"), [("AdamW8bit", 8, 256), ("AdamWFp8", 8, 256), ("AdamW4bit", 4, 128)])
def test_the_state_takes_a_byte_or_less_a_weight(name: str, bits: int, block: int) -> None:
    """Of a quantised weight: codes of so many bits, and a scale of 4 bytes a block."""
    model, optimizer = build(f"torchao/{name}")
    train(model, optimizer, range(1))
    weight = model.get_parameter("conv.weight")
    expected = weight.numel() * bits / 8 + 4 * weight.numel() / block
    table = 4 * 2**bits if name != "AdamWFp8" else 0  # what the codes mean
    assert sum(part.nbytes for part in parts(optimizer.state[weight]["exp_avg"])) == expected + table


def test_the_state_of_8_bits_stays_within_its_rounding_of_the_exact_one() -> None:
    """Dettmers' map has 16 steps in the largest decade of a block, so that a value next to the block's largest is off by up to a
    few parts in a hundred of it; errors of former steps fade as the averages do."""
    model, quantised = build("torchao/AdamW8bit")
    twin, exact = build("AdamW")
    for step in range(5):
        torch.autograd.backward(twin(step))
        for here, there in zip(model.parameters(), twin.parameters(), strict=True):
            assert there.grad is not None
            here.grad = there.grad.clone()
        quantised.step()
        exact.step()
        exact.zero_grad()
    for name, weight in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state, expected = quantised.state[weight][key], exact.state[twin.get_parameter(name)][key]
            rounded = state.dequantize() if hasattr(state, "dequantize") else state
            largest = expected.reshape(-1, 256).abs().amax(-1) if state is not rounded else expected.abs().max().reshape(1)
            errors = (rounded - expected).reshape(len(largest), -1).abs().amax(-1)
            assert (errors <= (0.05 if state is not rounded else 1e-6) * largest).all(), (name, key)
            assert state is rounded or not torch.equal(rounded, expected), "nothing was quantised"
