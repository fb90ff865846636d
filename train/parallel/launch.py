"""What this process was started with: the facts that the parallel mode follows from, each with what said it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ANCESTORS = 4  # accelerate launch is the parent; a shell or a wrapper may stand between


@dataclass(frozen=True)
class Launch:
    """What the launcher, its config file and the environment say about one run."""

    processes: int = 1  # that were started, on all machines
    machines: int = 1
    file: str | None = None  # the accelerate config in use, as far as it is known
    settings: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # of the launcher: value, and the file or flag
    devices: int = 0  # CUDA devices that are visible
    cuda: str | None = None  # the environment's CUDA_VISIBLE_DEVICES
    given: str | None = None  # the GPUs that a container was made with, as its NVIDIA_VISIBLE_DEVICES says
    driver: str | None = None  # NVIDIA's, where there is one
    old_driver: str | None = None  # what is wrong with it where it is too old for this torch
    cpu: bool = False  # the CPU was asked for
    fsdp: int = 0  # the version of FSDP that was asked for, 0 for none
    sizes: Mapping[str, int] = field(default_factory=dict)  # accelerate's parallelism_config: tp, cp, sp, dp_shard, dp_replicate
    precision: str = "no"
    precisions: tuple[str, ...] = ("bf16", "fp16", "tf32")  # beyond fp32, of the GPUs that there are
    compiler: str = "no"
    blocks: bool = False  # whether it compiles the model's blocks one by one

    def said(self, key: str) -> str:
        """A setting with its source, for people: `num_processes: 2 (ddp.yaml)`."""
        value, source = self.settings[key]
        return f"{key}: {value} ({source})"


def read(
    environment: Mapping[str, str],
    *,
    devices: int,
    precisions: tuple[str, ...],
    driver: str | None = None,
    old_driver: str | None = None,
) -> Launch:
    """The facts from this process's environment and from the command line of the `accelerate launch` that started it."""
    words = launcher_arguments()
    settings = launcher_settings(words) if words is not None else {}
    file = settings.pop("config_file", None)
    return Launch(
        processes=int(environment.get("WORLD_SIZE", "1")),
        machines=int(environment.get("GROUP_WORLD_SIZE", "1")),
        file=file[0] if file else None,
        settings=settings,
        devices=devices,
        cuda=environment.get("CUDA_VISIBLE_DEVICES"),
        given=environment.get("NVIDIA_VISIBLE_DEVICES"),
        driver=driver,
        old_driver=old_driver,
        cpu=_true(environment.get("ACCELERATE_USE_CPU")) or _true(settings.get("use_cpu", (None,))[0]),
        fsdp=int(environment.get("FSDP_VERSION", "1")) if _true(environment.get("ACCELERATE_USE_FSDP")) else 0,
        sizes={
            name: int(environment.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
            for name in ("tp", "cp", "sp", "dp_shard", "dp_replicate")
            if _true(environment.get("ACCELERATE_USE_PARALLELISM_CONFIG"))
        },
        precision=environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        precisions=precisions,
        compiler=environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
        blocks=_true(environment.get("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
    )


def precisions() -> tuple[str, ...]:
    """What the first GPU computes in beyond fp32; where there is none, what most do."""
    import torch

    if not torch.cuda.is_available():
        return Launch.precisions
    capability = torch.cuda.get_device_capability()
    least = {"fp16": (0, 0), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}  # NVIDIA's compute capabilities
    return tuple(name for name, needed in least.items() if capability >= needed)


def launcher_arguments() -> list[str] | None:
    """The arguments of the `accelerate launch` above this process; None where there is none or the system does not tell."""
    pid = os.getppid()
    for _ in range(_ANCESTORS):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return None
        for place, word in enumerate(words):
            name = Path(word).name
            if name == "accelerate-launch" or word == "accelerate.commands.launch":
                return words[place + 1 :]
            if name in ("accelerate", "accelerate.commands.accelerate_cli") and words[place + 1 : place + 2] == ["launch"]:
                return words[place + 2 :]
    return None


def launcher_settings(words: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """The flags that decide a mode over the config file that they name, else over the default one, each with its source."""
    import yaml
    from accelerate.commands.config.config_args import default_config_file

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for flag in ("config_file", "num_processes", "num_machines", "gpu_ids"):
        parser.add_argument(f"--{flag}", f"--{flag.replace('_', '-')}", dest=flag)
    parser.add_argument("--cpu", action="store_const", const=True, dest="use_cpu")
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    flags = {key: value for key, value in vars(parser.parse_known_args(words[:script])[0]).items() if value is not None}
    file = flags.pop("config_file", None)
    source = f"--config_file {file}"
    if file is None and not flags.get("use_cpu") and Path(default_config_file).is_file():
        file, source = default_config_file, f"the default config {default_config_file}"
    settings: dict[str, tuple[Any, str]] = {}
    if file is not None:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))  # JSON is YAML
        keys = ("distributed_type", "num_processes", "num_machines", "gpu_ids", "use_cpu")
        settings = {key: (content[key], source) for key in keys if key in content} | {"config_file": (file, source)}
    return settings | {key: (value, f"--{'cpu' if key == 'use_cpu' else key}") for key, value in flags.items()}


def _true(text: Any) -> bool:
    return str(text).lower() in ("true", "1", "yes", "on")
