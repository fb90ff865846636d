"""What `train bench scaling` compares: modes on so many devices, each an accelerate config file that starts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from train.config import Config, Parallel, Pipeline, Split, lanes_problem
from train.errors import UsageError
from train.parallel.lanes import sharing_problem
from train.parallel.launch import Launch, precisions
from train.parallel.mode import Mode, choose, config_problems

TYPES = {
    "single": "NO",
    "data_parallel": "NO",
    "ddp": "MULTI_GPU",
    "fsdp": "FSDP",
    "pipeline": "MULTI_GPU",
    "tensor": "MULTI_GPU",
}
FORMS = "single, ddp:N, fsdp:N, pipeline:N, tensor:N and data_parallel:N, with N devices, and accelerate config files (.yaml)"


class Files(NamedTuple):
    """What a setup is launched with."""

    accelerate: Path
    config: Path


@dataclass(frozen=True)
class Setup:
    """One thing that is compared. `accelerate` is the content of an accelerate config."""

    name: str
    accelerate: dict[str, Any]
    parallel: Parallel
    mode: Mode
    processes: int
    devices: int

    def write(self, folder: Path, place: int, config: Config) -> Files:
        """Its files, named after this and its place among all."""
        stem = f"{place}-{Path(self.name).stem.replace(':', '-')}"
        files = Files(folder / f"{stem}.accelerate.yaml", folder / f"{stem}.config.yaml")
        files.accelerate.write_text(yaml.safe_dump(self.accelerate, sort_keys=False), encoding="utf-8")
        files.config.write_text(config.model_copy(update={"parallel": self.parallel}).to_yaml(), encoding="utf-8")
        return files


def default_modes(config: Config, gpus: int) -> list[str]:
    """One device and as many as there are and can share the lanes; on a CPU one process and two."""
    if gpus == 1:
        return ["single"]
    most = max(gpus, 2)
    lanes = most if config.batch.lanes == "auto" else config.batch.lanes
    several = next((count for count in range(most, 1, -1) if not sharing_problem(lanes, count)), most)
    return ["single", f"ddp:{several}", *([f"data_parallel:{several}"] if gpus else [])]


def read_modes(names: Sequence[str], config: Config, gpus: int, precision: str) -> tuple[list[Setup], int]:
    """What the names stand for and the lanes that all share, or a UsageError with all that cannot be here."""
    setups, problems = [], []
    for name in dict.fromkeys(names):
        try:
            setups.append(_setup(name, config, gpus, precision))
        except UsageError as error:
            problems += [f"--modes {name}: {line}" for line in str(error).splitlines()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"--modes names {', '.join(twice)} twice")
    most = max((setup.processes for setup in setups), default=1)
    lanes = most if config.batch.lanes == "auto" else config.batch.lanes  # one a process would be another run in each mode
    if problem := lanes_problem(config.batch.size, lanes):
        problems.append(f"batch.lanes: auto means one for each process of the largest mode, but {problem}")
    for setup in setups:
        sharing = setup.processes if setup.mode.shares_lanes else 1
        if problem := sharing_problem(lanes, sharing, interleaved=setup.mode.name == "fsdp"):
            problems.append(f"--modes {setup.name}: {problem}")
        own = config.model_copy(update={"parallel": setup.parallel})
        problems += [f"--modes {setup.name}: {problem}" for problem in config_problems(setup.mode, own, lanes)]
    if problems:
        raise UsageError("\n".join(problems))
    return setups, lanes


def _setup(name: str, config: Config, gpus: int, precision: str) -> Setup:
    if name.endswith((".yaml", ".yml", ".json")):
        content, said, parallel = _file(Path(name)), f"--config_file {name}", config.parallel
    else:
        content, said = _content(name, gpus, precision), f"--modes {name}"
        parallel = parallel_of(name, config.parallel)
    kind = content.get("distributed_type")
    processes = content.get("num_processes", 1) if kind in ("MULTI_GPU", "FSDP") else 1
    deciding: tuple[str, ...] = ("distributed_type", "num_processes", "gpu_ids", "use_cpu")
    facts = Launch(
        processes=processes,
        file=name,
        settings={key: (content[key], said) for key in deciding if key in content},
        devices=gpus,
        cpu=bool(content.get("use_cpu")),
        sizes={"tp": (content.get("parallelism_config") or {}).get("parallelism_config_tp_size", 1)},
        fsdp=(content.get("fsdp_config") or {}).get("fsdp_version", 1) if kind == "FSDP" else 0,
        precision=str(content.get("mixed_precision", "no")),
        precisions=precisions(),
    )
    mode = choose(facts, parallel, config.speed)
    devices = processes
    if mode.name == "data_parallel":
        named = str(content.get("gpu_ids", "all"))
        devices = gpus if named == "all" else len(named.split(","))
    elif mode.name == "split":
        devices = len(set(parallel.split.devices))
    if mode.name != "split" and facts.devices and not facts.cpu and devices > gpus:
        raise UsageError(f"{devices} GPUs are needed and {gpus} are visible")
    return Setup(name, content, parallel, mode, processes, devices)


def parallel_of(name: str, parallel: Parallel) -> Parallel:
    """The configuration's `parallel` section without what belongs to other modes than this one."""
    kind, _, number = name.partition(":")
    pipeline = parallel.pipeline.model_copy(update={"stages": int(number)}) if kind == "pipeline" else Pipeline()
    tensor = parallel.tensor if kind == "tensor" else {}
    return parallel.model_copy(update={"mode": "auto", "split": Split(), "pipeline": pipeline, "tensor": tensor})


def _content(name: str, gpus: int, precision: str) -> dict[str, Any]:
    """The accelerate config that a short form stands for."""
    kind, _, number = name.partition(":")
    count = int(number) if number.isdecimal() else 1 if kind == "single" and not number else 0
    if kind not in TYPES:
        raise UsageError(f"there is no such mode; there are {FORMS}")
    if count < 1 or (kind == "single") != (count == 1):
        raise UsageError("takes one device, without a number" if kind == "single" else f"write {kind}:N, with N of 2 or more")
    if kind == "data_parallel" and not gpus:
        raise UsageError("nn.DataParallel computes on several GPUs, and torch sees none")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": TYPES[kind],
        **({"gpu_ids": ",".join(gpu_ids(count))} if gpus else {"use_cpu": True}),
        "num_processes": 1 if TYPES[kind] == "NO" else count,
        "mixed_precision": precision,
        **({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}} if kind == "fsdp" else {}),
        **({"parallelism_config": {"parallelism_config_tp_size": count}} if kind == "tensor" else {}),
    }


def gpu_ids(count: int) -> list[str]:
    """The first GPUs of those that CUDA_VISIBLE_DEVICES leaves, which accelerate would put its own list over."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def _file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        raise UsageError("is not an accelerate config, which is a YAML mapping such as configs/accelerate/cpu.yaml")
    for key in ("num_machines", "num_processes"):
        if not isinstance(content.get(key, 1), int):
            raise UsageError(f"{key}: must be a whole number, not {content[key]!r}")
    if content.get("num_machines", 1) > 1:
        raise UsageError(f"num_machines: {content['num_machines']}: only this machine is measured")
    return content
