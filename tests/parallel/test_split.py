"""A model cut over devices of one process computes what it would on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests import left, made
from tests.conftest import Runner
from tests.parallel.test_lanes import Bare, Outputs
from train.config import Parallel
from train.data.loader import Batch
from train.errors import UsageError
from train.parallel.lanes import Lanes
from train.parallel.split import SplitEngine

CUT = "parallel.split={devices: [cpu, cpu], at: [features.4]}"


def test_the_weights_are_those_of_one_device(tmp_path: Path) -> None:
    found = {}
    for name, settings in {"single": (), "split": (CUT,)}.items():
        train = Runner(tmp_path / name)
        made.shards(train.folder / "set", [13, 11])
        model = "model={name: torchvision/mobilenet_v3_small}"
        finished = train.run(made.config(train.folder), model, "steps=2", "ema.decay=0.9", *settings)
        assert finished.code == 0, finished.output
        assert f"mode: {name}, " in finished.output
        found[name] = left.weights(train)
    assert found["single"] == found["split"]


def cut(model: nn.Module, *at: str) -> SplitEngine:
    options = Parallel.model_validate({"split": {"devices": ["cpu", *["meta"] * len(at)], "at": at}})
    task = cast(Any, Outputs(lambda output: output))
    return SplitEngine(model, task, Lanes(1), cast(Any, Bare()), options, Batch({}, []), strict=True)


def test_later_modules_lie_and_compute_on_the_next_device() -> None:
    """The meta device stands for another card: it computes shapes alone."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.ReLU(), nn.Linear(4, 5)), nn.Linear(5, 2))
    cut(model, "2")
    placed = {name: tensor.device.type for name, tensor in model.state_dict().items()}
    assert {name for name, device in placed.items() if device == "cpu"} == {name for name in placed if name[0] in "01"}
    output = model(torch.ones(6, 3))
    assert (output.device.type, output.shape) == ("meta", (6, 2))


def test_a_module_that_there_is_not_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no module 2\.l; did you mean 2\.1\?"):
        cut(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Linear(4, 5))), "2.l")
