"""Runs of the product in real processes. Importing torch takes seconds, so they are forked from a server that has done so;
`launch` starts them through accelerate or torchrun as a person does, where that is what a test is about."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"
HANG_SECONDS = 120

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preload"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--container", action="store_true", help="also run the tests marked container, which build the image")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {kind: f"{kind}; run with --{kind}" for kind in ("slow", "container") if not config.getoption(f"--{kind}")}
    if not torch.cuda.is_available():
        reasons["gpu"] = "there is no GPU"
    for item in items:
        for kind, reason in reasons.items():
            if item.get_closest_marker(kind):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is written to the home folder, and nothing there is read."""
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hf"))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["WANDB_MODE"] = "offline"
    os.environ.pop("WANDB_API_KEY", None)


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("real data sets are not beside this checkout (../shared/data)")
    return SHARED_DATA


@dataclass
class Running:
    """A run under way: its processes, and the file that takes what they say."""

    processes: list[multiprocessing.process.BaseProcess]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Until the run has said so, or has ended."""
        self._until(lambda: text in self.output or not any(process.is_alive() for process in self.processes))
        assert text in self.output, self.output

    def kill(self, number: int = signal.SIGKILL) -> None:
        for process in self.processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, number)

    def end(self) -> Finished:
        """Wait for all; once one has failed the others get SIGTERM, as torchrun sends it, and SIGKILL if they hang."""
        try:
            self._until(lambda: all(not process.is_alive() for process in self.processes) or self._failed())
            if self._failed():
                time.sleep(0.3)
                self.kill(signal.SIGTERM)
            self._until(lambda: all(not process.is_alive() for process in self.processes))
        finally:
            self.kill()
        codes = [process.exitcode for process in self.processes]
        return Finished(next((code for code in codes if code), 0) or 0, self.output)

    def _failed(self) -> bool:
        return any(process.exitcode for process in self.processes)

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not done():
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"hung for {HANG_SECONDS} s:\n{self.output}")
            time.sleep(0.01)


@dataclass
class Finished:
    code: int
    output: str


@dataclass
class Runner:
    """Starts `train/main.py` with some settings, each run writing below `outputs`."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    count: int = 0

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def start(self, *settings: str, processes: int = 1) -> Running:
        from tests.preload import run_main

        self.count += 1
        log = self.folder / f"log-{self.count}.txt"
        log.touch()
        rendezvous = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        rendezvous |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(processes):
            variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
            variables |= self.environment
            if processes > 1:
                variables |= rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = [*settings, f"run.output_dir={self.outputs}"]
            process = _server.Process(target=run_main, args=(arguments, variables, str(log), str(self.folder)), daemon=False)
            process.start()
            started.append(process)
        return Running(started, log)

    def run(self, *settings: str, processes: int = 1) -> Finished:
        """A run to its end."""
        return self.start(*settings, processes=processes).end()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner


@dataclass
class Launched:
    process: subprocess.Popen[str]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start a command of this environment (`accelerate`, `torchrun`, `python`) in its own session; all is killed at the end."""
    launched: list[Launched] = []

    def start(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Launched:
        log = tmp_path / f"launch-{len(launched)}.txt"
        program = Path(sys.executable).parent / command[0]
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(program), *command[1:]],
                cwd=cwd, env=os.environ | (env or {}), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip
        launched.append(Launched(process, log))
        return launched[-1]

    yield start
    for item in launched:
        if item.process.poll() is None:
            os.killpg(item.process.pid, signal.SIGKILL)
        item.process.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
