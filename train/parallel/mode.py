"""Which way a run is computed in: a pure function of what the launcher and the machine say and of the `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from train.config import Parallel
from train.errors import UsageError
from train.parallel.launch import Launch

Name = Literal["single", "data_parallel", "ddp", "fsdp", "split"]


@dataclass(frozen=True)
class Mode:
    """What was decided, and from which file, flag or variable, a line each."""

    name: Name
    device: Literal["cpu", "cuda"]
    reasons: tuple[str, ...]


def choose(launch: Launch, parallel: Parallel) -> Mode:
    """The mode, or a UsageError with everything that cannot be."""
    problems = [*_launch_problems(launch, parallel), *_precision_problems(launch, parallel)]
    device: Literal["cpu", "cuda"] = "cuda" if _on_gpu(launch, parallel) else "cpu"
    name, reason = _name(launch, parallel, device)
    problems += _fits(name, launch, parallel, reason)
    if problems:
        raise UsageError("\n".join(problems))
    return Mode(name, device, (reason, *_hints(name, launch, device)))


def _on_gpu(launch: Launch, parallel: Parallel) -> bool:
    return launch.devices > 0 and not launch.cpu and parallel.device != "cpu"


def _name(launch: Launch, parallel: Parallel, device: str) -> tuple[Name, str]:
    several = f"{launch.processes} processes"
    source = _source(launch)
    if launch.fsdp and launch.processes > 1:
        return "fsdp", f"{several}, FSDP {launch.fsdp} of the accelerate config{source}"
    if launch.processes > 1:
        return "ddp", f"{several}{source}"
    if parallel.split.devices:
        return "split", f"parallel.split.devices={','.join(parallel.split.devices)}"
    if parallel.mode == "data_parallel":
        return "data_parallel", "parallel.mode=data_parallel"
    if parallel.mode == "auto" and device == "cuda" and (named := _named_devices(launch)) > 1:
        return "data_parallel", f"one process, and {named} GPUs are named: {launch.said('gpu_ids')}"
    return "single", f"one process{source}" + (", parallel.mode=single" if parallel.mode == "single" else "")


def _named_devices(launch: Launch) -> int:
    """How many GPUs were named one by one; 0 where all that there are were taken."""
    value = str(launch.settings.get("gpu_ids", ("all",))[0])
    return 0 if value == "all" else len(value.split(","))


def _source(launch: Launch) -> str:
    if "num_processes" in launch.settings:
        return f" ({launch.said('num_processes')})"
    return f" ({launch.file})" if launch.file else ""


def _hints(name: Name, launch: Launch, device: str) -> list[str]:
    if name == "single" and device == "cuda" and launch.devices > 1:
        return [
            f"{launch.devices} GPUs are visible and the first is used: --multi_gpu --num_processes {launch.devices} uses all of "
            "them, and gpu_ids that names them does so in one process (slower)"
        ]
    if device == "cpu" and launch.processes > 1 and not launch.cpu:
        return ["no GPU is visible: the processes run on the CPU"]
    return []


def _launch_problems(launch: Launch, parallel: Parallel) -> list[str]:
    """What the launcher was asked for and cannot be, or is not what runs."""
    problems = []
    asked = launch.settings.get("num_processes")
    if asked and int(asked[0]) > launch.processes:
        problems.append(
            f"{asked[0]} processes were asked for ({launch.said('num_processes')}) and {launch.processes} runs: accelerate "
            "starts one process for --cpu and for distributed_type MULTI_CPU or NO. Use --multi_gpu, or torchrun, or "
            "distributed_type: MULTI_GPU with use_cpu: true for CPU processes (configs/accelerate/cpu_2.yaml)."
        )
    if launch.devices == 0 and (wanted := _gpu_wanted(launch, parallel)):
        problems.append(
            f"a GPU is wanted ({wanted}) and torch sees none"
            + (f" (CUDA_VISIBLE_DEVICES={launch.cuda!r})" if launch.cuda is not None else "")
            + ". nvidia-smi tells whether the driver is there and new enough for this torch; in a container look at the GPU "
            "reservation. To train on the CPU say so: accelerate launch --cpu, use_cpu: true in the accelerate config, or "
            "parallel.device=cpu."
        )
    other = {size: number for size, number in launch.sizes.items() if number > 1 and size != "dp_shard"}
    if other:
        problems.append(f"parallelism_config: {other} is not supported; dp_shard_size is")
    if launch.fsdp == 1:
        problems.append("fsdp_version: 1 is not supported; set fsdp_version: 2 in the accelerate config")
    return problems


def _gpu_wanted(launch: Launch, parallel: Parallel) -> str | None:
    """What insists on a GPU. A bare `--multi_gpu` does not: it is also how several CPU processes are started."""
    if parallel.device == "cuda":
        return "parallel.device=cuda"
    if launch.cpu or parallel.device == "cpu":
        return None
    if _named_devices(launch):
        return launch.said("gpu_ids")
    kind = launch.settings.get("distributed_type")
    return launch.said("distributed_type") if kind and kind[0] in ("MULTI_GPU", "FSDP") else None


def _precision_problems(launch: Launch, parallel: Parallel) -> list[str]:
    if not _on_gpu(launch, parallel) and launch.precision in ("fp16", "fp8"):
        return [f"mixed_precision: {launch.precision} is not possible on a CPU; no and bf16 are"]
    if launch.precision == "fp8":
        return ["mixed_precision: fp8 is not supported; no, bf16 and fp16 are"]
    if launch.precision == "bf16" and not launch.bf16:
        return ["mixed_precision: bf16 is not possible on this GPU; no and fp16 are"]
    return []


def _fits(name: Name, launch: Launch, parallel: Parallel, reason: str) -> list[str]:
    """What is wrong with the mode's own numbers."""
    problems = []
    if parallel.mode != "auto" and parallel.mode != name:
        problems.append(f"parallel.mode: {parallel.mode} was asked for, but {reason} makes it {name}")
    if parallel.split.devices and name != "split":
        problems.append(f"parallel.split.devices: a model is cut over the devices of one process, and {reason} makes it {name}")
    if name == "split":
        problems += _split_problems(launch, parallel)
    if name == "data_parallel" and launch.compiler != "no":
        problems.append(
            f"dynamo_backend: {launch.compiler} cannot compile a model within nn.DataParallel; use DDP, or no compiler"
        )
    return problems


def _split_problems(launch: Launch, parallel: Parallel) -> list[str]:
    devices, at = parallel.split.devices, parallel.split.at
    there = ["cpu", *(f"cuda:{number}" for number in range(launch.devices))]
    problems = [
        f"parallel.split.devices: there is no {device}; there are {', '.join(there)}" for device in devices if device not in there
    ]
    if len(at) != len(devices) - 1:
        problems.append(f"parallel.split.at: {len(devices)} devices need {len(devices) - 1} modules to cut at, not {len(at)}")
    return problems
