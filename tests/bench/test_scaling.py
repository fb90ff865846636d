"""`train bench scaling` as a person calls it: what it measures is what the runs are made to cost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests import left, made
from tests.conftest import HANG_SECONDS, ROOT, Launched, Runner
from train.bench.setups import default_modes, read_modes
from train.config import Config
from train.errors import UsageError
from train.run import load_config

Launch = Callable[..., Launched]
MODEL = "model={name: tests.spies_failure:Linear}"
PASS_SECONDS = 0.3  # far above all else in a step, so that the speed-up is known


def ended(launched: Launched) -> tuple[int, str]:
    return launched.process.wait(3 * HANG_SECONDS), launched.output  # several launches


def scaling(launch: Launch, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    return ended(launch("python", "-m", "train", "bench", "scaling", *words, env=env))


@pytest.mark.slow
def test_two_processes_share_the_passes_and_train_the_same_weights(launch: Launch, train: Runner, tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [13, 11])
    settings = (made.config(tmp_path), MODEL, "run.name=spy", "batch.size=4", "batch.lanes=2")
    folder = tmp_path / "measured"
    options = ("--rounds", "1", "--warmup", "1", "--steps", "2", "--output", str(folder))
    code, output = scaling(launch, *settings, "epochs=5", *options, env={"SPY_SECONDS": str(PASS_SECONDS)})
    assert code == 0, output
    facts = json.loads((folder / "scaling.json").read_text())
    single, ddp = facts["setups"]
    assert [(one["name"], one["processes"], one["devices"]) for one in (single, ddp)] == [("single", 1, 1), ("ddp:2", 2, 2)]

    # A step of one process is two passes, of 4 samples; one of two processes is a pass.
    assert 0.6 * 4 / (2 * PASS_SECONDS) < single["median"]["samples_per_second"] < 4 / (2 * PASS_SECONDS)
    assert 1.3 < ddp["median"]["speedup"] < 2.05
    assert ddp["median"]["efficiency"] == ddp["median"]["speedup"] / 2
    for one in (single, ddp):
        own, [turn] = one["median"], one["turns"]
        # 5 epochs of 24 samples
        assert own["hours"] == pytest.approx(120 / own["samples_per_second"] / 3600)
        rates = [line["train/samples_per_second"] for line in turn["metrics"] if line["step"] in (2, 3)]
        assert own["samples_per_second"] == pytest.approx(8 / (4 / rates[0] + 4 / rates[1]))
        assert 0.1 < own["memory_gib"] < 4 and 0 <= own["data_wait"] < 0.5
    assert single["median"]["communication"] is None
    assert 0 < ddp["median"]["communication_exposed"] <= ddp["median"]["communication"] < 0.5

    steps = single["turns"][0]["metrics"][-1]["step"]
    finished = train.run(*settings, f"steps={steps}", f"data.path={tmp_path / 'set'}")
    assert finished.code == 0, finished.output
    assert {turn["weights_sha256"] for one in (single, ddp) for turn in one["turns"]} == {left.weights(train)}
    assert f"all turns in all modes ended with the same bits, sha256 {left.weights(train)}" in output

    table = (folder / "scaling.md").read_text()
    rows = {cells[1].strip(): cells[2:4] for cells in (line.split("|") for line in table.splitlines()) if len(cells) == 5}
    assert [cell.strip() for cell in rows["mode"]] == ["single", "ddp"]
    assert [cell.strip() for cell in rows["speed-up"]] == ["1.00", f"{ddp['median']['speedup']:.2f}"]
    assert f"{ddp['median']['samples_per_second']:,.1f}" in output
    assert "1 CPU thread" in table and "4 samples a step = 2 lanes x 2" in table and "gloo" in table
    drawn = "".join(ElementTree.parse(folder / "scaling.svg").getroot().itertext())
    assert f"{ddp['median']['speedup']:.2f}x" in drawn and "ddp:2" in drawn and "ideal" in drawn
    assert {path.name for path in folder.iterdir()} == {"setups"} | {f"scaling.{kind}" for kind in ("json", "md", "svg")}


def test_modes_that_cannot_be_are_told_at_once_and_nothing_is_made(launch: Launch, tmp_path: Path) -> None:
    wrong = {
        "dpp:2": "there is no such mode; there are single, ddp:N, fsdp:N, pipeline:N, tensor:N and data_parallel:N",
        "ddp": "write ddp:N, with N of 2 or more",
        "ddp:3": "batch.lanes: 4 lanes cannot be shared by 3 processes",
        "pipeline:2": "parallel.pipeline.split_at: 2 stages need 1 modules to cut at, not 0",
        "tensor:2": "parallel.tensor: which layers are cut is missing",
        "missing.yaml": "cannot be read: No such file or directory",
        "README.yml": "cannot be read",
        "configs/accelerate/data_parallel_2gpu.yaml": "a GPU is wanted (gpu_ids: 0,1 ",
    }
    output_dir = tmp_path / "outputs"
    code, output = scaling(launch, f"run.output_dir={output_dir}", "--modes", ",".join(["single", *wrong]))
    assert code == 2
    for mode, told in wrong.items():
        assert f"--modes {mode}: {told}" in output
    assert output.count("--modes ") == len(wrong) and "Traceback" not in output
    assert not output_dir.exists()


def test_a_configuration_that_is_missing_is_told(launch: Launch, tmp_path: Path) -> None:
    code, output = scaling(launch, "configs/cifar.yaml", f"run.output_dir={tmp_path / 'outputs'}")
    assert code == 2
    assert output.startswith("error: configs/cifar.yaml: no such file") and "did you mean configs/cifar10.yaml?" in output
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_a_run_that_fails_says_why(launch: Launch, tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [13])
    model = "model={name: tests.spies_failure:Unused}"
    code, output = scaling(
        launch, made.config(tmp_path), model, "steps=9", "--modes", "ddp:2", "--output", str(tmp_path / "measured")
    )
    assert code == 1
    assert output.startswith("error: ddp:2: a turn has failed:\n") and "no part in the loss" in output
    assert "Traceback" not in output and "torch/distributed" not in output


@pytest.mark.slow
def test_modes_take_turns_and_an_interrupted_measurement_leaves_its_whole_rounds(launch: Launch, tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [13])
    folder = tmp_path / "measured"
    files = "configs/accelerate/cpu.yaml,configs/accelerate/cpu_2.yaml"
    options = ("--modes", files, "--rounds", "9", "--warmup", "1", "--steps", "1", "--output", str(folder))
    launched = launch(
        "python", "-m", "train", "bench", "scaling", made.config(tmp_path), MODEL, "steps=9", *options, env={"SPY_SECONDS": "0.1"}
    )
    until(lambda: launched.output.count("samples/s") == 5, launched)
    until(lambda: len(list(folder.glob("tmp*/*/config.yaml"))) == 1, launched)  # the third round's second turn is under way
    launched.process.terminate()
    code, output = ended(launched)
    assert code == 1
    turns = re.findall(r"round (\d)/9  configs/accelerate/(\w+)\.yaml", output)
    assert turns == [("1", "cpu"), ("1", "cpu_2"), ("2", "cpu_2"), ("2", "cpu"), ("3", "cpu")]
    setups = json.loads((folder / "scaling.json").read_text())["setups"]
    assert [(one["name"], len(one["turns"])) for one in setups] == [(file, 2) for file in files.split(",")]
    assert not list(folder.glob("tmp*"))


def until(true: Callable[[], bool], launched: Launched) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not true():
        assert launched.process.poll() is None and time.monotonic() < deadline, launched.output
        time.sleep(0.02)


def config(tmp_path: Path, *settings: str) -> Config:
    return load_config([Path(made.config(tmp_path))], ["steps=1", *settings])


@pytest.mark.parametrize(
    ("gpus", "lanes", "modes"),
    [
        (0, "4", ["single", "ddp:2"]),
        (1, "4", ["single"]),
        (8, "auto", ["single", "ddp:8", "data_parallel:8"]),
        (8, "4", ["single", "ddp:4", "data_parallel:4"]),  # more processes than lanes would have nothing to do
    ],
)
def test_without_modes_one_device_is_compared_with_all(tmp_path: Path, gpus: int, lanes: str, modes: list[str]) -> None:
    assert default_modes(config(tmp_path, f"batch.lanes={lanes}"), gpus) == modes


def test_a_mode_on_gpus_starts_as_the_shipped_file_does(tmp_path: Path) -> None:
    names = ["single", "ddp:2", "data_parallel:2", "fsdp:2"]
    setups, lanes = read_modes(names, config(tmp_path, "batch.lanes=auto"), 2, "no")
    assert lanes == 2
    assert [(setup.mode.name, setup.devices) for setup in setups] == [
        ("single", 1),
        ("ddp", 2),
        ("data_parallel", 2),
        ("fsdp", 2),
    ]
    for setup, file in zip(setups, ["single_gpu", "ddp_2gpu", "data_parallel_2gpu", "fsdp2"], strict=True):
        shipped = yaml.safe_load((ROOT / "configs" / "accelerate" / f"{file}.yaml").read_text())
        assert {key: setup.accelerate[key] for key in shipped} == shipped


def test_a_pipeline_and_cut_layers_are_compared_with_modes_that_leave_them_out(tmp_path: Path) -> None:
    cuts = ("parallel.pipeline={stages: 2, split_at: [linear]}", "parallel.tensor={linear: rows}", "batch.lanes=2")
    setups, _ = read_modes(["single", "ddp:2", "pipeline:2", "tensor:2"], config(tmp_path, *cuts), 0, "no")
    assert [setup.mode.name for setup in setups] == ["single", "ddp", "pipeline", "tensor"]
    kept = [(setup.parallel.pipeline.stages, dict(setup.parallel.tensor)) for setup in setups]
    assert kept == [(1, {}), (1, {}), (2, {}), (1, {"linear": "rows"})]
    with pytest.raises(UsageError, match=r"--modes pipeline:2: batch.lanes: 1 lane cannot fill 2 pipeline stages"):
        read_modes(["pipeline:2"], config(tmp_path, *cuts, "batch.lanes=1"), 0, "no")


def test_only_the_gpus_that_are_left_visible_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    setups, _ = read_modes(["single", "ddp:2"], config(tmp_path), 2, "no")
    assert [setup.accelerate["gpu_ids"] for setup in setups] == ["2", "2,3"]
    with pytest.raises(UsageError, match="--modes ddp:4: 4 GPUs are needed and 2 are visible"):
        read_modes(["ddp:4"], config(tmp_path), 2, "no")
