"""What the README says is so: its commands run, its files load, and what it names is there."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from tests.conftest import HANG_SECONDS, ROOT, Launched, Runner
from tests.test_entry import LAUNCHERS
from train import cli
from train.config import effect
from train.run import load_config

README = (ROOT / "README.md").read_text(encoding="utf-8")


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in fences("bash") for line in block.splitlines() if line]


def recipe(command: list[str]) -> list[str]:
    """What `make` would run once .venv is there, a line each."""
    ready = ["--dry-run", "--old-file", ".venv/.made-from-lock", "--old-file", "requirements.lock"]
    outside = {key: text for key, text in os.environ.items() if not key.startswith(("MAKE", "ARGS"))}  # as if not in `make test`
    made = subprocess.run([*command, *ready], cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    return made.stdout.splitlines()


def small_data(folder: Path, side: int, mode: str) -> Path:
    """Twelve pictures of two classes, in the layout of the data sets that the shipped configurations name."""
    folder.mkdir()
    data = io.BytesIO()
    Image.new(mode, (side, side)).save(data, "png")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = pa.array([{"bytes": data.getvalue(), "path": None}] * 12, kind)
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": pictures, "label": [0, 1] * 6}), folder / f"{split}-00000-of-00001.parquet")
    return folder


def data_for(settings: list[str], folder: Path) -> Path:
    """Small data of the shape that the configuration in a command is for."""
    if "configs/shakespeare.yaml" in settings:
        (folder / "input.txt").write_text("To be, or not to be, that is the question.\n" * 100)
        return folder / "input.txt"
    shapes = {"configs/mnist.yaml": (28, "L"), "configs/cifar10.yaml": (32, "RGB")}
    return small_data(folder / "data", *next((shapes[setting] for setting in settings if setting in shapes), (8, "L")))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs(command: str, train: Runner, tmp_path: Path) -> None:
    """A command that is none of these kinds fails here: say how it is to be tested."""
    words = shlex.split(command)
    if "docker" in words:  # tests/container runs each of these services
        words = words[words.index("docker") :]
        services = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
        assert words[:2] == ["docker", "compose"]
        assert [word for word in words[2:] if word in services]
        assert not [word for word in shlex.split(command) if "configs/" in word and not (ROOT / word.split("=")[-1]).exists()]
        return
    if words[0] == "make":
        words = shlex.split(recipe(words)[-1])
    words[0] = words[0].removeprefix(".venv/bin/")
    if "train/main.py" in words:
        at = words.index("train/main.py")
        settings = [str(ROOT / word) if word.startswith("configs/") else word for word in words[at + 1 :]]
        data = data_for(words[at + 1 :], tmp_path)
        finished = train.run(*settings, f"data.path={data}", processes=LAUNCHERS[" ".join(words[:at])])
        assert finished.code == 0, finished.output
    elif words[:3] == ["python", "-m", "train"]:  # that click knows the words; the verbs' own tests run them
        assert CliRunner().invoke(cli.main, [*words[3:], "--help"]).exit_code == 0
    elif words[0] in ("ruff", "mypy") or words[:3] == ["python", "-m", "pytest"]:
        program = words[2] if words[0] == "python" else words[0]
        assert (Path(sys.executable).parent / program).exists()
        assert not [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
    else:  # the set-up by hand, which takes minutes: it is what the Makefile does, which CI has just done
        quiet = command.replace(" install ", " install --quiet --disable-pip-version-check ")
        assert quiet.replace("python3 -m", '"$$python" -m') in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", fences("yaml"))
def test_each_configuration_loads(text: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "configs" / "of-the-readme.yaml").write_text(text, encoding="utf-8")
    config = load_config([tmp_path / "configs" / "of-the-readme.yaml"], [])
    assert config.run.name == "mine"
    assert config.data.path == str(tmp_path / "data" / "mine")


def test_a_model_is_added_as_the_readme_says(launch: Callable[..., Launched], tmp_path: Path) -> None:
    [code] = fences("python")
    path = re.match(r"# (train/models/(\w+)\.py)\n", code)
    assert path
    for folder in ("train", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / path[1]).write_text(code, encoding="utf-8")
    settings = [f"model.name={path[2]}", "model.width=3", "steps=2", "batch.size=8", "data.workers=0", "evaluate.every=0"]
    launched = launch("python", "train/main.py", *settings, cwd=tmp_path)
    assert launched.process.wait(HANG_SECONDS) == 0, launched.output
    assert f"model: {path[2]}, 70 parameters" in launched.output  # 3 x (3 x 3 + 1) of the convolution, 10 x (3 + 1) of the end


def test_every_key_and_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL)))
    sections = "run|data|model|batch|optimizer|schedule|ema|evaluate|checkpoint|tracking"
    keys = {match[1] for text in named if (match := re.match(rf"((?:{sections})\.[a-z_.]+)(?:[:=]|$)", text))}
    assert len(keys) > 15
    assert not [key for key in keys if effect(key) is None and key != "data.transforms"]
    files = {text for text in named if re.match(r"(train|configs|tests|benchmarks|\.ci|\.github)/(?!CLASS)", text)}
    files |= set(re.findall(r"^    (train/\S*)", README, re.MULTILINE))
    assert len(files) > 10
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_readme_fits_a_sitting() -> None:
    assert len(README.splitlines()) <= 300
