"""State that lies in the host's memory between two steps changes no bit. Here the device is a CPU too."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.checkpoint.test_optimizer_state import through_files
from tests.checkpoint.test_quantised_state import build, train
from train.offload import HostState
from train.optimizer_state import load_optimizer_state, optimizer_state

NAMES = ["SGD", "AdamW", "NAdam", "Adafactor", "RMSprop", "torchao/AdamW8bit"]
ARGUMENTS = {"SGD": {"momentum": 0.9}}


def offloaded(name: str) -> tuple[nn.Module, Optimizer, HostState]:
    model, optimizer = build(name, **ARGUMENTS.get(name, {}))
    return model, optimizer, HostState(optimizer)


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_the_optimizer_whose_state_is_on_the_device(name: str) -> None:
    model, optimizer, host = offloaded(name)
    assert train(model, optimizer, range(4)) == train(*build(name, **ARGUMENTS.get(name, {})), range(4))
    states = {parameter: optimizer.state[parameter] for parameter in model.parameters()}
    tensors = [value for state in states.values() for value in state.values() if isinstance(value, Tensor) and value.dim()]
    assert {id(tensor) for tensor in tensors} == {id(tensor) for kept in host.kept.values() for tensor in kept.values()}


def test_only_the_state_of_the_parameter_that_is_updated_is_away_from_its_place() -> None:
    model, optimizer, host = offloaded("AdamW")
    train(model, optimizer, range(1))
    update, seen = host.update, []

    def watched() -> None:
        away = [
            parameter
            for parameter, kept in host.kept.items()
            if any(optimizer.state[parameter][name] is not tensor for name, tensor in kept.items())
        ]
        assert [id(parameter) for parameter in away] == [id(optimizer.param_groups[0]["params"][0])]
        seen.append(away[0])
        update()

    host.update = watched
    train(model, optimizer, range(1, 2))
    assert [id(parameter) for parameter in seen] == [id(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_to_the_same_bits_with_and_without(tmp_path: Path, name: str) -> None:
    model, optimizer, _ = offloaded(name)
    train(model, optimizer, range(2))
    plain = build(name, **ARGUMENTS.get(name, {}))
    through_files(tmp_path, model, optimizer, plain)
    again, resumed, host = offloaded(name)
    again.load_state_dict(model.state_dict())
    load_optimizer_state(again, resumed, *optimizer_state(model, optimizer), keep=host.keep)
    assert host.kept.keys() == set(again.parameters())
    reference = train(model, optimizer, range(2, 4))
    assert train(*plain, range(2, 4)) == train(again, resumed, range(2, 4)) == reference
