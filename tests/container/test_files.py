"""What the container's files promise can be read in them, without an engine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT
from train import driver

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
ENVIRONMENT = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if not line.startswith("#"))


def test_bases_are_pinned_by_digest_and_packages_by_hash_and_day() -> None:
    [base] = re.findall(r"^ARG CUDA_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d+-base-ubuntu24\.04@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${CUDA_IMAGE}", "system"}
    assert re.search(r"^ARG SNAPSHOT=\d{8}T\d{6}Z$", DOCKERFILE, re.MULTILINE)
    assert "--require-hashes" in DOCKERFILE


def test_compose_alone_finds_the_gpu_file() -> None:
    assert ENVIRONMENT["COMPOSE_FILE"] == "docker-compose.gpu.yml"


def test_training_has_what_large_runs_need() -> None:
    for name in ("train", "train-cpu"):
        service = SERVICES[name]
        assert service["shm_size"] == "8gb"
        assert service["ulimits"]["memlock"] == -1
        assert service["stop_grace_period"] == "2m"
        assert service["user"] == "${RUN_AS}"
        assert {volume.split(":")[1] for volume in service["volumes"]} == {"/workspace/outputs", "/workspace/configs", "/cache"}
        assert service["environment"]["WANDB_API_KEY"] is None  # passed on, and not written down
    [device] = SERVICES["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in SERVICES["train-cpu"]


def test_only_training_starts_with_a_bare_up() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["train"]


def test_the_readme_names_the_driver_that_the_dockerfile_decides() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"NVIDIA's driver {driver.minimum()} or newer" in text
    assert f"driver>={driver.minimum()}" in text
    assert 'could not select device driver "nvidia" with capabilities: [[gpu]]' in text


def test_services_without_a_gpu_ask_for_none() -> None:
    """Where NVIDIA's runtime is the default, the variable of NVIDIA's base image would give them all."""
    for name, service in SERVICES.items():
        assert ("deploy" in service) != (service["environment"].get("NVIDIA_VISIBLE_DEVICES") == "void"), name


def test_only_what_is_named_goes_into_the_image() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    taken = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert taken == {"train", "configs", "deploy/container", "pyproject.toml", "requirements*.lock", "Dockerfile"}


def test_the_results_folder_is_shipped_so_that_it_is_the_callers(tmp_path: Path) -> None:
    """A folder that is missing is made by the engine, as root."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)
    assert (tmp_path / "clone" / "outputs").is_dir()
