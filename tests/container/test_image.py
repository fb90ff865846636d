"""The image that the Dockerfile makes, run through the compose file as a person runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT, Runner
from tests.container.conftest import BUILD_SECONDS, COMMIT, LEFT_LYING, RUN_SECONDS, TAG, USER, Checkout
from train import cli, driver
from train.receipt import document

pytestmark = pytest.mark.container

Run = Callable[..., subprocess.CompletedProcess[str]]
MEBIBYTE = 2**20
KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form of W&B's


def summary(outputs: Path, name: str) -> dict[str, Any]:
    [path] = outputs.glob(f"{name}-*/summary.json")
    facts: dict[str, Any] = json.loads(path.read_text())
    return facts


def test_the_default_run_gives_the_same_bits_inside_and_outside(run: Run, image: Checkout, train: Runner) -> None:
    inside = run("train-cpu", "run.name=inside")
    assert inside.returncode == 0, inside.stderr
    outside = train.run("run.name=outside")
    assert outside.code == 0, outside.output
    found, expected = summary(image.folder / "outputs", "inside"), summary(train.outputs, "outside")
    assert found["metrics"]["validation/accuracy"] >= 0.97
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["metrics"] == expected["metrics"]
    [folder] = (image.folder / "outputs").glob("inside-*")
    environment = document.read(folder)["environments"][0]
    assert (environment["code"]["commit"], environment["image"]) == (COMMIT, TAG)
    assert CliRunner().invoke(cli.main, ["verify", str(folder), "--steps", "40"]).exit_code == 0


def test_results_belong_to_the_caller(run: Run, image: Checkout) -> None:
    finished = run("train-cpu", "run.name=mine", "steps=2", "evaluate.every=0")
    assert finished.returncode == 0, finished.stderr
    [folder] = (image.folder / "outputs").glob("mine-*")
    assert finished.stdout.strip() == f"/workspace/outputs/{folder.name}"
    owners = {f"{path.stat().st_uid}:{path.stat().st_gid}" for path in [folder, *folder.rglob("*")]}
    assert owners == {USER}


def test_a_configuration_of_the_checkout_and_an_accelerate_file_are_taken(run: Run, image: Checkout) -> None:
    (image.folder / "configs" / "my.yaml").write_text("base: digits.yaml\nrun: {name: my}\nsteps: 3\n")
    settings = ("configs/my.yaml", "optimizer.lr=0.01", "evaluate.every=0")
    finished = run("train-cpu", *settings, ACCELERATE_CONFIG="configs/accelerate/cpu_2.yaml")
    assert finished.returncode == 0, finished.stderr
    assert "mode: ddp, 2 processes (num_processes: 2 (--config_file configs/accelerate/cpu_2.yaml))" in finished.stderr
    [config] = (image.folder / "outputs").glob("my-*/config.yaml")
    assert "lr: 0.01" in config.read_text()


def test_another_user_may_follow_on_the_same_cache(image: Checkout) -> None:
    for user in ("4242:4242", "4343:4343"):
        seen = image.compose("run", "--rm", "-T", "train-cpu", "--dry-run", RUN_AS=user)
        assert seen.returncode == 0, seen.stderr


def test_accelerate_config_is_remembered_in_the_cache_volume(run: Run, image: Checkout) -> None:
    try:
        answered = run("config", "default", "--mixed_precision", "bf16")
        assert answered.returncode == 0, answered.stderr
        finished = run("train-cpu", "--dry-run")
        assert "precision bf16" in finished.stdout, finished.stdout + finished.stderr
    finally:
        image.compose("run", "--rm", "-T", "--entrypoint", "sh", "train-cpu", "-c", "rm -r /cache/*/huggingface/accelerate")


def test_the_gpu_service_refuses_to_train_on_the_cpu(run: Run) -> None:
    """On an engine that takes the reservation and gives no GPU, or on one that does not take it."""
    if driver.find():
        pytest.skip("there is a GPU here, on which it trains")
    refused = run("train", "steps=1", "evaluate.every=0")
    assert refused.returncode != 0
    said = refused.stderr
    assert 'could not select device driver "nvidia"' in said or "a GPU is wanted (NVIDIA_VISIBLE_DEVICES=all" in said, said


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_compose_stop_saves_at_the_current_step_and_the_same_command_goes_on_exactly(run: Run, image: Checkout) -> None:
    default = image.folder / "configs" / "digits.yaml"
    default.write_text(default.read_text().replace("name: digits}", "name: stopped}"))
    outputs = image.folder / "outputs"
    try:
        assert image.compose("up", "--detach", "train-cpu").returncode == 0
        until(lambda: "step 100/" in _logs(image))
        start = time.monotonic()
        assert image.compose("stop", "train-cpu").returncode == 0
        assert time.monotonic() - start < 30
        logs = _logs(image)
    finally:
        image.compose("rm", "--force", "train-cpu")
    stopped = summary(outputs, "stopped")
    assert stopped["status"] == "stopped", logs
    assert 100 <= stopped["step"] < 270
    assert "SIGTERM: saving at the next step boundary, then stopping." in logs
    assert list(outputs.glob(f"stopped-*/checkpoints/step-{stopped['step']:08d}"))
    resumed = run("train-cpu")
    assert resumed.returncode == 0, resumed.stderr
    assert f"step-{stopped['step']:08d}, step {stopped['step']}" in resumed.stderr
    whole = run("train-cpu", "run.name=whole")
    assert whole.returncode == 0, whole.stderr
    assert summary(outputs, "stopped")["weights_sha256"] == summary(outputs, "whole")["weights_sha256"]


def _logs(image: Checkout) -> str:
    answer = image.compose("logs", "--no-log-prefix", "train-cpu")
    return answer.stdout + answer.stderr


def test_any_user_without_a_home_and_with_a_root_that_cannot_be_written(image: Checkout) -> None:
    """The image as it is, without the compose file's help: only /tmp, the caches and the results can be written."""
    volumes = [word for place in ("/cache", "/workspace/outputs") for word in ("--mount", f"type=volume,target={place}")]
    bare = ["--rm", "--network", "host", "--user", "4242:4242", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp:exec"]
    command = [
        "env",
        "-u",
        "HOME",
        "-u",
        "USER",
        "deploy/container/run",
        "deploy/container/train",
        "steps=2",
        "tracking.wandb=offline",
    ]
    finished = image(
        "docker", "run", *bare, *volumes, "--env", "NVIDIA_VISIBLE_DEVICES=void", "--entrypoint", command[0], TAG, *command[1:]
    )
    assert finished.returncode == 0, finished.stderr
    assert "step 2  validation/accuracy" in finished.stderr


def test_a_compiled_model_is_trained_by_any_user(run: Run, image: Checkout) -> None:
    """Its kernels are compiled by g++ at run time, into the cache volume."""
    file = image.folder / "configs" / "accelerate" / "compiled.yaml"
    file.write_text((ROOT / "configs/accelerate/cpu.yaml").read_text() + "dynamo_config: {dynamo_backend: INDUCTOR}\n")
    finished = run(
        "train-cpu", "run.name=compiled", "steps=2", "evaluate.every=0", ACCELERATE_CONFIG=f"configs/accelerate/{file.name}"
    )
    assert finished.returncode == 0, finished.stderr
    found = image.compose(
        "run", "--rm", "-T", "--entrypoint", "find", "train-cpu", "/cache", "-path", "*/inductor/*", "-name", "*.so"
    )
    assert found.stdout, found.stderr


def test_a_wandb_key_is_passed_on_and_kept_nowhere(run: Run, image: Checkout) -> None:
    settings = ("run.name=tracked", "steps=2", "evaluate.every=0", "tracking.wandb=online")
    finished = run("train-cpu", *settings, WANDB_API_KEY=KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert finished.returncode == 0, finished.stderr
    assert KEY not in finished.stdout + finished.stderr
    kept = [
        path for path in (image.folder / "outputs").glob("tracked-*/**/*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert not kept
    searched = image.compose("run", "--rm", "-T", "--entrypoint", "grep", "train-cpu", "-rl", KEY, "/workspace", "/cache")
    assert searched.returncode == 1, searched.stdout  # nothing found


def test_the_image_tells_nothing_of_the_machine_and_its_project_layer_is_small(image: Checkout) -> None:
    history = image.docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", TAG)
    config = image.docker("image", "inspect", TAG)
    for text in (history, config):
        assert LEFT_LYING not in text
        assert str(image.folder) not in text
        assert str(ROOT) not in text
    sizes = [int(line.split("\t")[0]) for line in history.splitlines() if "COPY /project/" in line]
    assert len(sizes) == 1
    assert sizes[0] <= 5 * MEBIBYTE
    bare = ("run", "--rm", "--network", "host", "--user", "0", "--entrypoint")
    assert not image.docker(*bare, "sh", TAG, "-c", f"grep -rl {LEFT_LYING} /workspace /cache; true")
    shipped = {"Dockerfile", "configs", "deploy", "outputs", "pyproject.toml", "requirements.lock", "train"}
    assert set(image.docker(*bare, "ls", TAG, "-A", "/workspace").split()) == shipped
    assert not image.docker(*bare, "find", TAG, "/workspace/outputs", "/cache", "-type", "f")
    [facts] = json.loads(config)
    assert facts["Config"]["User"] == "10001:10001"
    assert f"NVIDIA_REQUIRE_CUDA=driver>={driver.minimum()}" in facts["Config"]["Env"]


def test_the_doctor_finds_a_box_without_a_gpu_fit(image: Checkout) -> None:
    examined = image.compose("run", "--rm", "-T", "doctor-cpu", "--quick", "--json")
    assert examined.returncode == 0, examined.stdout + examined.stderr
    report = json.loads(examined.stdout)
    found = {finding["subject"]: finding for findings in report.values() for finding in findings}
    assert found["container"]["found"] == "this is one"
    for subject in ("versions", "compiler", "results", "data cache", "compiled kernels", "shared memory"):
        assert found[subject]["state"] == "ok", found[subject]


@pytest.mark.parametrize(
    ("service", "words"), [("shell", ["-c", "echo $HOME"]), ("tensorboard", ["--version"]), ("config", ["--help"])]
)
def test_the_tools_start(image: Checkout, service: str, words: list[str]) -> None:
    started = image.compose("run", "--rm", "-T", service, *words)
    if service == "shell" and 'could not select device driver "nvidia"' in started.stderr:
        pytest.skip("this engine takes no GPU reservation")
    assert started.returncode == 0, started.stderr
    assert started.stdout.strip()


@pytest.mark.slow
def test_two_builds_of_one_commit_are_the_same_layers(image: Checkout, tmp_path: Path) -> None:
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    arguments = {"SOURCE_DATE_EPOCH": epoch, **({"CUDA_IMAGE": base} if (base := os.environ.get("CUDA_IMAGE")) else {})}
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    layers = []
    for number in (1, 2):
        output = f"type=oci,tar=false,dest={tmp_path / str(number)},rewrite-timestamp=true,compression=uncompressed"
        command = ("docker", "buildx", "build", "--network", "host", "--no-cache", *options, "--output", output, ".")
        built = image(*command, seconds=BUILD_SECONDS)
        if "exporter is not supported" in built.stderr:
            pytest.skip(
                "this builder writes no OCI images; docker buildx create --use --driver docker-container makes one that does"
            )
        assert built.returncode == 0, built.stderr
        layers.append(_layers(tmp_path / str(number)))
        shutil.rmtree(tmp_path / str(number))
    assert layers[0] == layers[1]
    assert len(layers[0]) >= 4


def _layers(folder: Path) -> list[str]:
    """The digests of the layers of the one image in an OCI layout."""

    def blob(digest: str) -> Any:
        return json.loads((folder / "blobs" / digest.replace(":", "/")).read_text())

    index = json.loads((folder / "index.json").read_text())
    manifest = blob(index["manifests"][0]["digest"])
    if "manifests" in manifest:  # an index of platforms and attestations
        manifest = blob(manifest["manifests"][0]["digest"])
    return [layer["digest"] for layer in manifest["layers"]]
