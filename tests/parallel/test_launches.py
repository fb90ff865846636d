"""Each file of configs/accelerate starts its mode through `accelerate launch`, and modes that share lanes give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import left, made
from tests.conftest import HANG_SECONDS, ROOT, Launched, Runner, free_port

FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
MODES = {"cpu": "single", "cpu_2": "ddp", "ddp_2gpu": "ddp", "ddp_8gpu": "ddp", "fsdp2": "fsdp"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
MODEL = ("model={name: cifar_cnn, width: 3}", "optimizer={name: AdamW, lr: 0.01, clip_norm: 0.5}", "ema.decay=0.9")


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if "8" in file.stem else []) for file in FILES]
)
def test_each_file_is_short_and_starts_its_mode_or_says_that_the_gpus_are_missing(
    file: Path, launch: Callable[..., Launched], tmp_path: Path
) -> None:
    assert 5 <= len(file.read_text().splitlines()) <= 10
    processes = yaml.safe_load(file.read_text())["num_processes"]
    command = ["accelerate", "launch", "-q", "--config_file", str(file), "--main_process_port", str(free_port())]
    run = ["train/main.py", "--dry-run", f"batch.lanes={max(4, processes)}", f"run.output_dir={tmp_path}"]
    launched = launch(*command, *run, *(["parallel.device=cpu"] if file.stem in MODES else []))
    launched.process.wait(HANG_SECONDS)
    if file.stem in MODES:
        assert f"# mode: {MODES[file.stem]}, " in launched.output, launched.output
        assert str(file) in launched.output or processes == 1
    else:
        assert "a GPU is wanted (gpu_ids: " in launched.output and str(file) in launched.output, launched.output


def test_two_processes_asked_for_in_a_way_that_starts_one_are_refused(launch: Callable[..., Launched], tmp_path: Path) -> None:
    settings = ("train/main.py", "steps=1", f"run.output_dir={tmp_path / 'outputs'}")
    launched = launch("accelerate", "launch", "-q", "--cpu", "--num_processes", "2", *settings)
    assert launched.process.wait(HANG_SECONDS) != 0
    assert "2 processes were asked for (num_processes: 2 (--num_processes)) and 1 runs" in launched.output
    assert not (tmp_path / "outputs").exists()


def test_sharded_and_replicated_weights_have_the_same_bits_and_continue_each_other(tmp_path: Path) -> None:
    """With BatchNorm, clipping and averaged weights; the chain goes from FSDP on 2 to DDP on 4, to one process, to FSDP on 4."""
    kinds = {"single": (1, {}), "ddp": (2, {}), "fsdp": (2, FSDP), "fsdp 4": (4, FSDP)}
    found, metrics = {}, {}
    for name, (processes, environment) in kinds.items():
        found[name], metrics[name] = run_in_parts(tmp_path / name, [(processes, environment, 4)])
    chain = [(2, FSDP, 1), (4, {}, 2), (1, {}, 3), (4, FSDP, 4)]
    found["chain"], metrics["chain"] = run_in_parts(tmp_path / "chain", chain)
    assert len(set(found.values())) == 1, found
    assert len(set(metrics.values())) == 1, metrics


def run_in_parts(folder: Path, parts: list[tuple[int, dict[str, str], int]]) -> tuple[str, str]:
    """The weights and the metrics of a run whose parts, each to its step, are of so many processes in such an environment."""
    for processes, environment, steps in parts:
        train = Runner(folder, environment)
        if not (folder / "set").exists():
            made.shards(folder / "set", [13, 11])
            made.shards(folder / "set", [9], "validation")
        settings = (*MODEL, f"steps={steps}", "checkpoint.every=1", "evaluate.every=2")
        finished = train.run(made.config(folder), *settings, processes=processes)
        assert finished.code == 0, finished.output
        assert f"mode: {'fsdp' if environment else 'single' if processes == 1 else 'ddp'}, " in finished.output
    assert not [name for name in left.tensors(train) if "module." in name or "_orig_mod" in name]
    return left.weights(train), str(left.summary(train)["metrics"])
