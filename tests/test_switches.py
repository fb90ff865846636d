"""The `speed` section changes how a step is computed; what it promises to leave as it is stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import left
from tests.conftest import Runner
from tests.test_invariance import EVERYTHING
from train import switches
from train.config import Switches
from train.errors import UsageError
from train.parallel.launch import Launch


def weights(folder: Path, *settings: str, processes: int = 1, environment: dict[str, str] | None = None) -> str:
    folder.mkdir(exist_ok=True)
    train = Runner(folder, environment or {})
    finished = train.run(*EVERYTHING, "evaluate.every=0", "data.workers=0", *settings, processes=processes)
    assert finished.code == 0, finished.output
    return left.weights(train)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights without any switch."""
    return weights(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    ("processes", "environment"), [(1, {}), (2, {}), pytest.param(2, FSDP, marks=pytest.mark.slow)], ids=["single", "ddp", "fsdp"]
)
def test_recomputed_activations_leave_every_bit(tmp_path: Path, plain: str, processes: int, environment: dict[str, str]) -> None:
    """Of all modules: dropout must draw the same again, and BatchNorm's statistics must not move twice."""
    recomputed = weights(tmp_path, "speed.recompute=['*']", processes=processes, environment=environment)
    assert recomputed == plain


def kept(model: nn.Module) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights left out."""
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in mine:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(4, 3, 32, 32)).sum().backward()
    return sum(sizes.values())


def test_recomputed_activations_are_not_kept() -> None:
    from torchvision.models import resnet18

    model = resnet18()
    before = kept(model)
    switches.fit(model, Switches(recompute=("layer*",)), Launch())
    assert kept(model) < before / 2
    assert list(model.state_dict()) == list(resnet18().state_dict())


def test_fp8_takes_the_layers_that_fit_and_leaves_their_names() -> None:
    """The products themselves need a GPU that has them; tensor cores take multiples of 16."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))
    names = list(model.state_dict())
    switches.fit(model, Switches(precision="fp8"), Launch())
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "ReLU", "Linear"]
    assert list(model.state_dict()) == names


def test_a_module_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"no module block\*; its parts are 0, 1, and"):
        switches.fit(nn.Sequential(nn.ReLU(), nn.ReLU()), Switches(recompute=("0", "block*")), Launch())


def test_channels_last_gives_the_same_bits_on_any_number_of_processes(tmp_path: Path, plain: str) -> None:
    found = {weights(tmp_path / str(processes), "speed.channels_last=true", processes=processes) for processes in (1, 2)}
    assert len(found) == 1
    assert found != {plain}  # it is another kernel, which adds in another order


@pytest.mark.slow
def test_the_precision_of_the_configuration_is_that_of_the_launcher(tmp_path: Path, plain: str) -> None:
    said = weights(tmp_path / "said", "speed.precision=bf16")
    launched = weights(tmp_path / "launched", environment={"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert said == launched != plain
    assert weights(tmp_path / "fp32", "speed.precision=fp32") == plain


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "blocks"])
def test_compiled_runs_give_the_same_bits_on_any_number_of_processes(tmp_path: Path, what: str) -> None:
    found = {weights(tmp_path / str(processes), f"speed.compile={what}", processes=processes) for processes in (1, 2)}
    if what == "blocks":
        found.add(weights(tmp_path / "fsdp", f"speed.compile={what}", processes=2, environment=FSDP))
    assert len(found) == 1


@pytest.fixture
def attention() -> Iterator[None]:
    """Kernels of attention as they were."""
    cuda = torch.backends.cuda
    enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()
    yield
    for enable, before in zip(
        (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp), enabled, strict=True
    ):
        enable(before)


@pytest.mark.parametrize(("kernel", "operator"), [("flash", "flash_attention"), ("math", "attention_math")])
def test_the_attention_kernel_is_the_one_asked_for(attention: None, kernel: str, operator: str) -> None:
    switches.set_kernels(Switches(attention=kernel))
    queries = torch.randn(1, 2, 8, 16)
    with torch.profiler.profile() as profile:
        nn.functional.scaled_dot_product_attention(queries, queries, queries)
    assert any(operator in event.name for event in profile.events())
