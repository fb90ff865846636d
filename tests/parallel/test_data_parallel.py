"""nn.DataParallel, as far as a box without two GPUs shows it: what is wrapped, what counts in the loss, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import left, made
from tests.conftest import Runner
from tests.parallel.test_lanes import Bare, Outputs
from train.config import Parallel
from train.data.loader import Batch
from train.parallel.data_parallel import DataParallelEngine
from train.parallel.engine import Engine, LanePass
from train.parallel.lanes import Lanes


class FourDevices(nn.DataParallel):
    """Cuts and gathers as on four GPUs: parts along dimension 0, of which the last may be short or missing."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        return torch.cat([self.module(part) for part in inputs[0].chunk(4)])


@pytest.mark.parametrize("samples", [8, 7, 5, 3, 1])
def test_every_sample_counts_alike_also_where_the_parts_are_uneven_or_fewer_than_the_devices(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn, "DataParallel", FourDevices)
    images = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(samples) % 3
    task = cast(Any, Outputs(lambda output: functional.cross_entropy(output, labels, reduction="sum")))
    results = []
    for kind in (Engine, DataParallelEngine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        engine = kind(model, task, Lanes(1), cast(Any, Bare()), Parallel(), Batch({}, []), strict=True)
        assert isinstance(engine.model, FourDevices) == (kind is DataParallelEngine)
        [loss] = engine.forward_backward([LanePass(0, cast(Any, images), samples)], samples, seed=lambda lane: None)
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
        assert not [name for name in engine.plain.state_dict() if name.startswith("module.")]
    for one, parallel in zip(*results, strict=True):
        torch.testing.assert_close(parallel, one, rtol=1e-6, atol=1e-7)


def test_a_run_keeps_the_plain_names_and_another_mode_goes_on_with_it(tmp_path: Path) -> None:
    """Without a GPU the library's DataParallel computes on the one device there is."""
    weights = []
    for name, modes in {"single": ["auto", "auto"], "both": ["data_parallel", "auto"]}.items():
        train = Runner(tmp_path / name)
        made.shards(train.folder / "set", [13, 11])
        for mode, steps in zip(modes, (2, 4), strict=True):
            settings = (
                made.config(train.folder),
                f"steps={steps}",
                "checkpoint.every=1",
                "ema.decay=0.9",
                f"parallel.mode={mode}",
            )
            finished = train.run(*settings)
            assert finished.code == 0, finished.output
            assert f"mode: {'single' if mode == 'auto' else mode}, " in finished.output
            assert not [key for key in left.tensors(train) if "module." in key]
        weights.append(left.weights(train))
    assert len(set(weights)) == 1
