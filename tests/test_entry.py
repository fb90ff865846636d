"""The ways in: however the script is launched, it finds its own code and its libraries, in as many processes as asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import HANG_SECONDS, ROOT, Launched

# What may stand before `train/main.py` in the README's commands, and the processes that it starts.
LAUNCHERS = {
    "python": 1,
    "accelerate launch -q": 1,
    "accelerate launch -q --multi_gpu --num_processes 2": 2,
    "torchrun --standalone --nproc-per-node 2": 2,
}

Launch = Callable[..., Launched]


@pytest.fixture(autouse=True)
def no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def ended(launched: Launched) -> tuple[int, str]:
    return launched.process.wait(HANG_SECONDS), launched.output


@pytest.mark.parametrize(
    "launcher",
    # The others' parts are all in the fast tests: `accelerate` launches through torchrun, and below without it.
    [pytest.param(launcher, marks=() if "--multi_gpu" in launcher else pytest.mark.slow) for launcher in LAUNCHERS],
)
def test_each_launcher_of_the_readme_starts_its_number_of_processes(launch: Launch, launcher: str) -> None:
    command = launcher.split()
    if "--multi_gpu" in command:  # other tests may hold the port that is the default
        command[2:2] = ["--main_process_port", "0"]
    code, output = ended(launch(*command, "train/main.py", "--dry-run"))
    assert code == 0, output
    processes = LAUNCHERS[launcher]
    assert f"\n# mode: {'single, one process' if processes == 1 else f'ddp, {processes} processes'}" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("command", ["accelerate launch -q -m train.main", "python -m train.main"])
def test_the_script_runs_as_a_module(launch: Launch, command: str) -> None:
    code, output = ended(launch(*command.split(), "--dry-run"))
    assert code == 0, output
    assert "\n# mode: single, one process" in output, output


def test_a_fork_runs_from_anywhere_with_files_called_like_libraries(launch: Launch, tmp_path: Path) -> None:
    fork = tmp_path / "a fork, größer"
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("train", "configs"):
        shutil.copytree(ROOT / folder, fork / folder, ignore=ignore)
    for name in ("accelerate", "click", "data", "datasets", "random", "torch", "wandb", "yaml"):
        (fork / "train" / f"{name}.py").write_text(f"raise ImportError('the file of the fork was taken for {name}')\n")
    (tmp_path / "elsewhere").mkdir()
    settings = ("steps=2", "batch.size=8", "tracking.wandb=offline", "evaluate.every=2")
    code, output = ended(
        launch("accelerate", "launch", "-q", str(fork / "train" / "main.py"), *settings, cwd=tmp_path / "elsewhere")
    )
    assert code == 0, output
    assert (tmp_path / "elsewhere" / "outputs").is_dir()  # a relative run.output_dir starts where the command was given
    assert "validation/accuracy" in output


def test_help_teaches_the_command_without_loading_torch(launch: Launch) -> None:
    code, output = ended(launch("python", "-X", "importtime", "train/main.py", "--help"))
    assert code == 0
    for told in ("[CONFIG.yaml ...] [key=value ...]", "--dry-run", "accelerate launch train/main.py", "Exit codes: 0 done"):
        assert told in output
    loaded = {line.split("|")[-1].strip() for line in output.splitlines() if line.startswith("import time:")}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "accelerate", "datasets", "pydantic"}


def test_an_error_through_the_launcher_is_our_message_and_exit_code_1(launch: Launch) -> None:
    code, output = ended(launch("accelerate", "launch", "-q", "train/main.py", "stepz=5"))
    assert code == 1, output
    assert "\nerror: command line: stepz: unknown key; did you mean steps?" in output
    assert "Traceback" not in output
