"""Which way a run is computed in: a pure function of what the launcher and the machine say and of the `parallel` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from train import switches
from train.config import Config, Parallel, Switches
from train.errors import UsageError
from train.optim import is_quantised
from train.parallel.launch import Launch

Name = Literal["single", "data_parallel", "ddp", "fsdp", "split", "tensor", "pipeline"]


@dataclass(frozen=True)
class Mode:
    """What was decided, and from which file, flag or variable, a line each."""

    name: Name
    device: Literal["cpu", "cuda"]
    reasons: tuple[str, ...]

    @property
    def shares_lanes(self) -> bool:
        """Whether the lanes are shared out over the processes; else each computes its part of the model for all lanes."""
        return self.name not in ("tensor", "pipeline")


def choose(launch: Launch, parallel: Parallel, speed: Switches) -> Mode:
    """The mode, or a UsageError with everything that cannot be."""
    device: Literal["cpu", "cuda"] = "cuda" if _on_gpu(launch, parallel) else "cpu"
    problems = [*_launch_problems(launch, parallel), *switches.problems(launch, speed, device)]
    problems += _precision_problems(launch, device)
    launch = switches.over(launch, speed)
    name, reason = _name(launch, parallel, device)
    problems += _fits(name, launch, parallel, speed, reason)
    if problems:
        raise UsageError("\n".join(problems))
    return Mode(name, device, (reason, *_hints(name, launch, device)))


def _on_gpu(launch: Launch, parallel: Parallel) -> bool:
    return launch.devices > 0 and not launch.cpu and parallel.device != "cpu"


def _name(launch: Launch, parallel: Parallel, device: str) -> tuple[Name, str]:
    several = f"{launch.processes} processes" + (f" on {launch.machines} machines" if launch.machines > 1 else "")
    source = _source(launch)
    if parallel.pipeline.stages > 1 and launch.processes > 1:
        return "pipeline", f"{several}, parallel.pipeline.stages={parallel.pipeline.stages}{source}"
    if launch.sizes.get("tp", 1) > 1 and launch.processes > 1:
        return "tensor", f"{several}, tp_size {launch.sizes['tp']} of the accelerate config{source}"
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
    if asked and int(asked[0]) > launch.processes > 1:
        problems.append(
            f"{launch.processes} processes run on {launch.machines} machines, and {asked[0]} were asked for "
            f"({launch.said('num_processes')}): those of all machines, so many on each. Make it a multiple of num_machines."
        )
    elif asked and int(asked[0]) > launch.processes:
        problems.append(
            f"{asked[0]} processes were asked for ({launch.said('num_processes')}) and {launch.processes} runs: accelerate "
            "starts one process for --cpu and for distributed_type MULTI_CPU or NO. Use --multi_gpu, or torchrun, or "
            "distributed_type: MULTI_GPU with use_cpu: true for CPU processes (configs/accelerate/cpu_2.yaml)."
        )
    if launch.old_driver and not (launch.cpu or parallel.device == "cpu"):
        problems.append(launch.old_driver)
    elif launch.devices == 0 and (wanted := _gpu_wanted(launch, parallel)):
        problems.append(
            f"a GPU is wanted ({wanted}) and torch sees none"
            + (f" (CUDA_VISIBLE_DEVICES={launch.cuda!r})" if launch.cuda is not None else "")
            + ". nvidia-smi and `python -m train doctor` tell why; a container needs a GPU reservation or docker run --gpus all. "
            "To train on the CPU say so: accelerate launch --cpu, use_cpu: true in the accelerate config, or parallel.device=cpu."
        )
    other = {size: number for size, number in launch.sizes.items() if number > 1 and size not in ("dp_shard", "tp")}
    if other:
        problems.append(f"parallelism_config: {other} is not supported; dp_shard_size and tp_size are")
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
    if launch.given not in (None, "", "void", "none"):
        return f"NVIDIA_VISIBLE_DEVICES={launch.given}, so that this is a container for GPUs"
    if launch.driver and launch.cuda != "":
        return f"NVIDIA's driver is here, {launch.driver}"
    kind = launch.settings.get("distributed_type")
    return launch.said("distributed_type") if kind and kind[0] in ("MULTI_GPU", "FSDP") else None


def _precision_problems(launch: Launch, device: str) -> list[str]:
    if device == "cpu" and launch.precision in ("fp16", "fp8"):
        return [f"mixed_precision: {launch.precision} is not possible on a CPU; no and bf16 are"]
    if launch.precision == "fp8":
        return ["mixed_precision: fp8 is asked for by speed.precision here; no, bf16 and fp16 are possible"]
    if device == "cuda" and launch.precision == "bf16" and "bf16" not in launch.precisions:
        return ["mixed_precision: bf16 is not possible on this GPU; no and fp16 are"]
    return []


def _fits(name: Name, launch: Launch, parallel: Parallel, speed: Switches, reason: str) -> list[str]:
    """What is wrong with the mode's own numbers."""
    problems = []
    if parallel.mode != "auto" and parallel.mode != name:
        problems.append(f"parallel.mode: {parallel.mode} was asked for, but {reason} makes it {name}")
    if parallel.split.devices and name != "split":
        problems.append(f"parallel.split.devices: a model is cut over the devices of one process, and {reason} makes it {name}")
    if name == "split":
        problems += _split_problems(launch, parallel)
    if parallel.pipeline.stages > 1:
        problems += _pipeline_problems(name, launch, parallel)
    elif parallel.pipeline.split_at:
        problems.append("parallel.pipeline.split_at: the number of stages is missing; set parallel.pipeline.stages")
    if name == "tensor" or parallel.tensor:
        problems += _tensor_problems(name, launch, parallel)
    if name in ("tensor", "pipeline"):
        if launch.precision == "fp16":
            problems.append(f"fp16 is not possible in mode {name} (mixed_precision, speed.precision); bf16 is")
        if launch.compiler != "no":
            problems.append(f"{launch.compiler} is not possible in mode {name} (dynamo_backend, speed.compile); use no compiler")
    if name in ("data_parallel", "pipeline") and speed.recompute:
        problems.append(f"speed.recompute: is not possible in mode {name}, which copies or traces the model; leave it empty")
    if launch.compiler != "no" and speed.recompute:
        problems.append(f"speed.recompute: cannot be joined with {launch.compiler} (dynamo_backend, speed.compile)")
    if name == "fsdp" and launch.compiler != "no" and not launch.blocks:
        problems.append("FSDP gathers the weights of one block at a time: set speed.compile: blocks, or no compiler")
    if name in ("fsdp", "tensor") and speed.offload != "off":
        problems.append(
            f"speed.offload: is not possible in mode {name}, which cuts the state over the processes; set speed.offload: off"
            + ("; fsdp_offload_params of the accelerate config takes weights and state to the host" if name == "fsdp" else "")
        )
    if name == "data_parallel" and launch.compiler != "no":
        problems.append(f"{launch.compiler} cannot compile within nn.DataParallel (dynamo_backend, speed.compile); use DDP")
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


def _pipeline_problems(name: Name, launch: Launch, parallel: Parallel) -> list[str]:
    stages, at = parallel.pipeline.stages, parallel.pipeline.split_at
    problems = []
    if launch.processes != stages:
        runs = f"{launch.processes} {'runs' if launch.processes == 1 else 'run'}"
        problems.append(f"parallel.pipeline.stages: {stages} stages need {stages} processes, and {runs}")
    if len(at) != stages - 1:
        problems.append(f"parallel.pipeline.split_at: {stages} stages need {stages - 1} modules to cut at, not {len(at)}")
    if launch.fsdp or launch.sizes.get("tp", 1) > 1:
        problems.append("parallel.pipeline: cannot be joined with FSDP or tensor parallelism; take one of them out")
    return problems


def _tensor_problems(name: Name, launch: Launch, parallel: Parallel) -> list[str]:
    size = launch.sizes.get("tp", 1)
    problems = []
    if name != "tensor":
        problems.append(
            "parallel.tensor: layers are cut over as many processes as tp_size in the parallelism_config of the accelerate "
            "config says, and it says none (configs/accelerate/tensor_parallel.yaml)"
        )
    elif size != launch.processes:
        problems.append(f"parallelism_config: tp_size {size} needs {size} processes, and {launch.processes} run")
    elif not parallel.tensor:
        problems.append("parallel.tensor: which layers are cut is missing, such as parallel.tensor={fc1: columns, fc2: rows}")
    if launch.fsdp and name == "tensor":
        problems.append("parallelism_config: tp_size cannot be joined with FSDP; take one of them out")
    return problems


def config_problems(mode: Mode, config: Config, lanes: int) -> list[str]:
    """What a mode cannot do that the rest of the configuration asks for."""
    if mode.name in ("fsdp", "tensor") and is_quantised(config.optimizer.name):
        return [
            f"optimizer.name: {config.optimizer.name} is not possible in mode {mode.name}, where each process would quantise "
            "blocks of its own part of a weight and the numbers would depend on how many there are; take torch.optim's, or DDP"
        ]
    if mode.name != "pipeline":
        return []
    stages, problems = config.parallel.pipeline.stages, []
    if lanes < stages:
        problems.append(
            f"batch.lanes: {lanes} {'lane' if lanes == 1 else 'lanes'} cannot fill {stages} pipeline stages: the lanes are the "
            f"micro-batches; set batch.lanes to {stages} or more, better {4 * stages}"
        )
    if config.data.on_error == "skip":
        problems.append("data.on_error: skip is not possible in a pipeline, whose micro-batches are all of one size; use stop")
    return problems
