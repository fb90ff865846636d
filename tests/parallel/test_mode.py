"""The mode follows from what the launcher and the machine say, and what cannot be is refused with its numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ROOT
from train.config import Parallel, Switches
from train.errors import UsageError
from train.parallel.launch import Launch, launcher_settings
from train.parallel.mode import choose, config_problems
from train.run import load_config

FILE = "--config_file my.yaml"


def said(**settings: Any) -> dict[str, tuple[Any, str]]:
    return {key: (value, FILE) for key, value in settings.items()}


GPUS = said(gpu_ids="0,1", num_processes=1)
CASES = [
    # what is there                                                             the section       mode and device
    (Launch(), {}, "single cpu"),
    (Launch(devices=1), {}, "single cuda"),
    (Launch(devices=4), {}, "single cuda"),
    (Launch(devices=4, cpu=True), {}, "single cpu"),
    (Launch(devices=4), {"device": "cpu"}, "single cpu"),
    (Launch(devices=2, settings=GPUS), {}, "data_parallel cuda"),
    (Launch(devices=2, settings=GPUS), {"mode": "single"}, "single cuda"),
    (Launch(devices=2, settings=said(gpu_ids="all")), {}, "single cuda"),
    (Launch(devices=2), {"mode": "data_parallel"}, "data_parallel cuda"),
    (Launch(processes=2), {}, "ddp cpu"),
    (Launch(processes=2, devices=2, settings=said(gpu_ids="0,1", num_processes=2)), {}, "ddp cuda"),
    (Launch(processes=8, devices=8), {}, "ddp cuda"),
    (Launch(processes=2, settings=said(distributed_type="MULTI_GPU", use_cpu=True), cpu=True), {}, "ddp cpu"),
    (Launch(processes=2, devices=2, fsdp=2), {}, "fsdp cuda"),
    (Launch(processes=1, devices=1, fsdp=2), {}, "single cuda"),  # there is nobody to share with
    (Launch(devices=2), {"split": {"devices": ["cuda:0", "cuda:1"], "at": ["layer3"]}}, "split cuda"),
    (Launch(processes=2), {"pipeline": {"stages": 2, "split_at": ["layer3"]}}, "pipeline cpu"),
    (Launch(processes=2, devices=2), {"pipeline": {"stages": 2, "split_at": ["layer3"]}}, "pipeline cuda"),
    (Launch(processes=2, devices=2, sizes={"tp": 2}), {"tensor": {"fc": "rows"}}, "tensor cuda"),
    (Launch(devices=1, precision="fp16"), {}, "single cuda"),
    (Launch(precision="bf16"), {}, "single cpu"),
    (Launch(devices=1, given="all"), {}, "single cuda"),
    (Launch(given="void"), {}, "single cpu"),
    (Launch(given="all", cpu=True), {}, "single cpu"),
    (Launch(given="all"), {"device": "cpu"}, "single cpu"),
    (Launch(driver="580.95.05", cuda=""), {}, "single cpu"),  # hidden on purpose
    (Launch(old_driver="the driver is old", cpu=True), {}, "single cpu"),
    (Launch(old_driver="the driver is old"), {"device": "cpu"}, "single cpu"),
]


@pytest.mark.parametrize(("launch", "section", "expected"), CASES)
def test_the_mode_follows_from_what_is_said(launch: Launch, section: dict[str, Any], expected: str) -> None:
    mode = choose(launch, Parallel(**section), Switches())
    assert f"{mode.name} {mode.device}" == expected


def test_the_banner_names_what_decided() -> None:
    assert choose(Launch(devices=2, settings=GPUS), Parallel(), Switches()).reasons == (
        f"one process, and 2 GPUs are named: gpu_ids: 0,1 ({FILE})",
    )
    [reason, hint] = choose(Launch(devices=3), Parallel(), Switches()).reasons
    assert reason == "one process"
    assert "3 GPUs are visible and the first is used: --multi_gpu --num_processes 3 uses all" in hint
    assert choose(Launch(processes=16, machines=2, devices=8), Parallel(), Switches()).reasons == ("16 processes on 2 machines",)
    [reason, hint] = choose(Launch(processes=2, settings=said(num_processes=2)), Parallel(), Switches()).reasons
    assert reason == f"2 processes (num_processes: 2 ({FILE}))"
    assert "no GPU is visible" in hint


PIPELINE = {"pipeline": {"stages": 2, "split_at": ["layer3"]}}
TENSOR = {"tensor": {"fc": "rows"}}
REFUSALS = [
    (Launch(), PIPELINE, ["2 stages need 2 processes, and 1 runs"]),
    (Launch(processes=4), PIPELINE, ["2 stages need 2 processes, and 4 run"]),
    (Launch(processes=3), {"pipeline": {"stages": 3, "split_at": ["layer3"]}}, ["3 stages need 2 modules to cut at, not 1"]),
    (Launch(), {"pipeline": {"split_at": ["layer3"]}}, ["set parallel.pipeline.stages"]),
    (Launch(processes=2, fsdp=2), PIPELINE, ["cannot be joined with FSDP"]),
    (Launch(processes=2, devices=2, precision="fp16"), PIPELINE, ["fp16 is not possible in mode pipeline"]),
    (Launch(processes=2, compiler="inductor"), PIPELINE, ["inductor is not possible in mode pipeline"]),
    (Launch(processes=2, sizes={"tp": 2}), {}, ["which layers are cut is missing"]),
    (Launch(processes=4, sizes={"tp": 2}), TENSOR, ["tp_size 2 needs 2 processes, and 4 run"]),
    (Launch(processes=2, sizes={"tp": 2}, fsdp=2), TENSOR, ["tp_size cannot be joined with FSDP"]),
    (Launch(processes=2), TENSOR, ["it says none (configs/accelerate/tensor_parallel.yaml)"]),
    (Launch(processes=2, sizes={"tp": 2, "cp": 2}), TENSOR, ["{'cp': 2} is not supported; dp_shard_size and tp_size are"]),
    (Launch(settings=said(num_processes=2)), {}, ["2 processes were asked for", "and 1 runs", "--multi_gpu", "cpu_2.yaml"]),
    (
        Launch(settings=said(num_processes=5, num_machines=2), processes=4, machines=2, cpu=True),
        {},
        ["4 processes run on 2 machines, and 5 were asked for", "a multiple of num_machines"],
    ),
    (
        Launch(settings=said(distributed_type="MULTI_GPU"), processes=2),
        {},
        ["a GPU is wanted", "nvidia-smi", "parallel.device=cpu"],
    ),
    (Launch(settings=said(gpu_ids="0")), {}, ["a GPU is wanted (gpu_ids: 0", "torch sees none"]),
    (
        Launch(given="all"),
        {},
        ["a GPU is wanted (NVIDIA_VISIBLE_DEVICES=all, so that this is a container", "docker run --gpus all"],
    ),
    (Launch(driver="580.95.05"), {}, ["a GPU is wanted (NVIDIA's driver is here, 580.95.05)", "torch sees none"]),
    (Launch(old_driver="the driver is old: install 580"), {}, ["the driver is old: install 580"]),
    (Launch(cuda=""), {"device": "cuda"}, ["parallel.device=cuda", "CUDA_VISIBLE_DEVICES=''"]),
    (Launch(precision="fp16"), {}, ["fp16 is not possible on a CPU; no and bf16 are"]),
    (Launch(precision="fp8"), {}, ["fp8 is not possible on a CPU"]),
    (Launch(devices=1, precision="bf16", precisions=("fp16",)), {}, ["bf16 is not possible on this GPU"]),
    (Launch(processes=2), {"mode": "data_parallel"}, ["data_parallel was asked for", "2 processes makes it ddp"]),
    (
        Launch(devices=2, compiler="inductor"),
        {"mode": "data_parallel"},
        ["inductor cannot compile within nn.DataParallel"],
    ),
    (
        Launch(devices=1),
        {"split": {"devices": ["cuda:0", "cuda:1"], "at": []}},
        ["no cuda:1; there are cpu, cuda:0", "need 1 modules"],
    ),
    (Launch(processes=2), {"split": {"devices": ["cpu"]}}, ["devices of one process", "2 processes makes it ddp"]),
    (Launch(processes=2, devices=2, fsdp=1), {}, ["fsdp_version: 2"]),
    (Launch(processes=4, devices=4, fsdp=2, sizes={"cp": 2, "dp_shard": 2}), {}, ["{'cp': 2} is not supported"]),
]


@pytest.mark.parametrize(("launch", "section", "words"), REFUSALS)
def test_what_cannot_be_is_refused_with_the_numbers(launch: Launch, section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        choose(launch, Parallel(**section), Switches())
    assert not [word for word in words if word not in str(refusal.value)], refusal.value


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as refusal:
        choose(Launch(settings=said(num_processes=2, gpu_ids="0,1"), precision="fp16"), Parallel(), Switches())
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cpu", "--num_processes", "2", "main.py"], {"use_cpu": (True, "--cpu"), "num_processes": ("2", "--num_processes")}),
        (["--num-processes=2", "main.py", "--num_processes", "7"], {"num_processes": ("2", "--num_processes")}),
        (["--multi_gpu", "-q", "--gpu_ids", "0,1", "-m", "train.main"], {"gpu_ids": ("0,1", "--gpu_ids")}),
    ],
)
def test_flags_of_the_launcher_are_read_up_to_the_script(
    words: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "/no/such/file")
    assert launcher_settings(words) == expected


SWITCHED = [
    (Launch(), {"precision": "fp16"}, ["speed.precision: fp16 is not possible on this device; fp32, bf16 are"]),
    (
        Launch(),
        {"precision": "tf32", "attention": "cudnn"},
        ["tf32 is not", "cudnn does not run on cpu; flash, math do"],
    ),
    (Launch(devices=1), {"precision": "fp8"}, ["fp8 is not possible on this device; fp32, bf16, fp16, tf32 are"]),
    (Launch(precision="bf16"), {"precision": "fp32"}, ["fp32 was asked for, and mixed_precision: bf16 of accelerate"]),
    (Launch(devices=1), {"cuda_graphs": True}, ["compiled kernels on a GPU; set speed.compile: model"]),
    (Launch(), {"cuda_graphs": True, "compile": "model"}, ["compiled kernels on a GPU"]),
    (Launch(compiler="inductor"), {"recompute": ("layer1",)}, ["speed.recompute: cannot be joined with inductor"]),
    (Launch(processes=2, fsdp=2), {"compile": "model"}, ["set speed.compile: blocks"]),
    (Launch(), {"offload": "optimizer"}, ["in the host's memory already; set speed.offload: off"]),
    (Launch(processes=2, devices=2, fsdp=2), {"offload": "optimizer"}, ["not possible in mode fsdp", "fsdp_offload_params"]),
]


@pytest.mark.parametrize(("launch", "speed", "words"), SWITCHED)
def test_a_switch_that_the_device_does_not_have_is_refused_with_those_that_it_has(
    launch: Launch, speed: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UsageError) as refusal:
        choose(launch, Parallel(), Switches(**speed))
    assert not [word for word in words if word not in str(refusal.value)], refusal.value


@pytest.mark.parametrize("speed", [{"compile": "model"}, {"compile": "blocks"}, {"recompute": ("layer1",)}])
def test_a_pipeline_and_data_parallel_take_neither_a_compiler_nor_recomputation(speed: dict[str, Any]) -> None:
    for launch, section in (
        (Launch(processes=2), {"pipeline": {"stages": 2, "split_at": ["layer3"]}}),
        (Launch(devices=2), {"mode": "data_parallel"}),
    ):
        with pytest.raises(UsageError, match=r"speed\.(compile|recompute)"):
            choose(launch, Parallel(**section), Switches(**speed))


def test_what_a_gpu_has_may_be_asked_for() -> None:
    graphs = Switches(precision="tf32", compile="blocks", cuda_graphs=True, attention="cudnn")
    assert choose(Launch(devices=1), Parallel(), graphs).name == "single"
    assert choose(Launch(devices=1, precisions=("bf16", "fp8"), precision="bf16"), Parallel(), Switches(precision="fp8"))
    assert choose(Launch(processes=2, devices=2), Parallel(), Switches(offload="optimizer")).name == "ddp"


@pytest.mark.parametrize("launch", [Launch(processes=2, fsdp=2), Launch(processes=2, sizes={"tp": 2})], ids=["fsdp", "tensor"])
def test_a_quantised_optimizer_is_refused_where_its_blocks_would_follow_the_processes(launch: Launch) -> None:
    parallel = Parallel(tensor={"fc": "rows"}) if launch.sizes else Parallel()
    chosen = load_config([ROOT / "configs" / "digits.yaml"], ["optimizer={name: torchao/AdamW8bit, lr: 1e-3}"])
    [problem] = config_problems(choose(launch, parallel, Switches()), chosen, 2)
    assert "torchao/AdamW8bit is not possible in mode" in problem and "take torch.optim's, or DDP" in problem
    assert not config_problems(choose(Launch(processes=2), Parallel(), Switches()), chosen, 2)
