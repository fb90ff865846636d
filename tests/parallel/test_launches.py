"""Each file of configs/accelerate starts its mode through `accelerate launch`, and modes that share lanes give the same bits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from tests import left, made
from tests.conftest import HANG_SECONDS, ROOT, Launched, Runner, free_port
from train.run import load_config

FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
MODES = {
    "cpu": "single",
    "cpu_2": "ddp",
    "ddp_2gpu": "ddp",
    "ddp_8gpu": "ddp",
    "fsdp2": "fsdp",
    "pipeline_2gpu": "pipeline",
    "tensor_parallel": "tensor",
    "two_nodes": "ddp",
}
WHAT_A_MODE_NEEDS = {
    "pipeline": ("parallel.pipeline={stages: 2, split_at: ['7']}",),
    "tensor": ("model.name=tests.parallel.nets:mlp", "parallel.tensor={'1': columns, '3': rows}"),
}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
MODEL = ("model={name: cifar_cnn, width: 3}", "optimizer={name: AdamW, lr: 0.01, clip_norm: 0.5}", "ema.decay=0.9")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem, marks=[] if file.stem == "cpu_2" else [pytest.mark.slow]) for file in FILES],
)
def test_each_file_is_short_and_starts_its_mode_or_says_that_the_gpus_are_missing(
    file: Path, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    assert 5 <= len(file.read_text().splitlines()) <= 10
    content = yaml.safe_load(file.read_text())
    processes, machines = content["num_processes"], content.get("num_machines", 1)
    command = ["accelerate", "launch", "-q", "--config_file", str(file), "--main_process_port", str(free_port())]
    run = ["train/main.py", "--dry-run", f"batch.lanes={max(4, processes)}", f"run.output_dir={tmp_path}"]
    run += WHAT_A_MODE_NEEDS.get(MODES.get(file.stem, ""), ())
    run += ["parallel.device=cpu"] if file.stem in MODES else []
    here = ["--main_process_ip", "127.0.0.1"] if machines > 1 else []
    launched = [launch(*command, *here, *(["--machine_rank", str(rank)] if here else []), *run) for rank in range(machines)]
    for one in launched:
        one.process.wait(HANG_SECONDS)
    output = launched[0].output
    if file.stem in MODES:
        assert f"# mode: {MODES[file.stem]}, " in output, output
        assert f" on {machines} machines (" in output or machines == 1
        assert str(file) in output or processes == 1
    else:
        assert "a GPU is wanted (gpu_ids: " in output and str(file) in output, output


def test_the_page_beside_the_files_names_each_and_gives_commands_that_are_understood() -> None:
    page = (ROOT / "configs" / "accelerate" / "README.md").read_text(encoding="utf-8")
    assert {file.name for file in FILES} == set(re.findall(r"\b(\w+\.yaml)`", page)) - {"kubernetes.yaml"}
    commands = [
        line.strip() for line in page.replace("\\\n", " ").splitlines() if line.startswith("    ") and "train/main.py" in line
    ]
    assert len(commands) == 5
    for command in commands[1:]:
        words = shlex.split(command)
        assert all((ROOT / word).is_file() for word in words if word.endswith((".yaml", ".py")) and word != "CONFIG.yaml")
        settings = [word for word in words[words.index("train/main.py") + 1 :] if "=" in word]
        load_config([ROOT / "configs" / "cifar10.yaml"], settings)


def test_two_processes_asked_for_in_a_way_that_starts_one_are_refused(launch: Callable[..., Launched], tmp_path: Path) -> None:
    settings = ("train/main.py", "steps=1", f"run.output_dir={tmp_path / 'outputs'}")
    launched = launch("accelerate", "launch", "-q", "--cpu", "--num_processes", "2", *settings)
    assert launched.process.wait(HANG_SECONDS) != 0
    assert "2 processes were asked for (num_processes: 2 (--num_processes)) and 1 runs" in launched.output
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_every_mode_goes_on_with_what_every_other_has_saved_to_the_same_bits(tmp_path: Path) -> None:
    """With BatchNorm, dropout, clipping and averaged weights, also compiled (trial B49); weights and metrics."""
    chains = [
        [(SINGLE, 4)],
        [(FSDP_2, 1), (PIPELINE_4, 2), (compiled(DDP_2), 3), (FSDP_4, 4)],
        [(GPIPE_2, 1), (DDP_4, 2), (compiled(SINGLE), 3), (PIPELINE_2, 4)],
    ]
    results = [run_in_parts(tmp_path / str(number), chain) for number, chain in enumerate(chains)]
    assert len(set(results)) == 1, results


@pytest.mark.slow
def test_every_mode_alone_gives_the_same_bits(tmp_path: Path) -> None:
    kinds = [SINGLE, compiled(SINGLE), DDP_2, compiled(DDP_2), DDP_4, FSDP_2, FSDP_4, PIPELINE_2, PIPELINE_4, GPIPE_2]
    results = [run_in_parts(tmp_path / str(number), [(kind, 4)]) for number, kind in enumerate(kinds)]
    assert len(set(results)) == 1, results


@dataclass(frozen=True)
class Kind:
    mode: str
    processes: int
    environment: dict[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()


def stages(*at: str) -> tuple[str, ...]:
    quoted = ",".join(f'"{name}"' for name in at)
    return f"parallel.pipeline.stages={len(at) + 1}", f"parallel.pipeline.split_at=[{quoted}]"


SINGLE = Kind("single", 1)
DDP_2, DDP_4 = (Kind("ddp", processes) for processes in (2, 4))
FSDP_2, FSDP_4 = (Kind("fsdp", processes, FSDP) for processes in (2, 4))
PIPELINE_2, PIPELINE_4 = Kind("pipeline", 2, settings=stages("8")), Kind("pipeline", 4, settings=stages("4", "8", "13"))
GPIPE_2 = Kind("pipeline", 2, settings=(*stages("5"), "parallel.pipeline.schedule=gpipe"))


def compiled(kind: Kind) -> Kind:
    return replace(kind, environment={**kind.environment, "ACCELERATE_DYNAMO_BACKEND": "EAGER"})


@pytest.mark.slow
def test_an_optimizer_without_any_state_goes_on_in_other_modes_too(tmp_path: Path) -> None:
    chains = [[(SINGLE, 2)], [(FSDP_2, 1), (PIPELINE_2, 2)]]
    plain = ("optimizer={name: SGD, lr: 0.01}", "ema.decay=")
    results = [run_in_parts(tmp_path / str(number), chain, *plain) for number, chain in enumerate(chains)]
    assert len(set(results)) == 1, results


def run_in_parts(folder: Path, parts: list[tuple[Kind, int]], *more: str) -> tuple[str, str]:
    """The weights and the metrics of a run whose parts, each to its step, are of such kinds."""
    for kind, steps in parts:
        train = Runner(folder, kind.environment)
        if not (folder / "set").exists():
            made.shards(folder / "set", [13, 11])
            made.shards(folder / "set", [9], "validation")
        settings = (*MODEL, f"steps={steps}", "checkpoint.every=1", "evaluate.every=2", *kind.settings, *more)
        finished = train.run(made.config(folder), *settings, processes=kind.processes)
        assert finished.code == 0, finished.output
        assert f"mode: {kind.mode}, " in finished.output
    assert not [name for name in left.tensors(train) if "module." in name or "_orig_mod" in name]
    return left.weights(train), str(left.summary(train)["metrics"])
