"""The image, built from this checkout as a person builds it, and commands in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import ROOT

TAG = "lockstep-test"
LEFT_LYING = "fedcba9876543210fedcba9876543210fedcba98"  # a W&B key in files of the checkout
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
BUILD_SECONDS, RUN_SECONDS = 1800, 300
USER = "12345:12345" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"  # whom the results are to belong to


@pytest.fixture(scope="session")
def engine() -> None:
    """A container engine that answers, with Compose and Buildx."""
    for command in ("info", "compose version", "buildx version"):
        try:
            answer = subprocess.run(["docker", *command.split()], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no docker on the PATH; .ci/engine starts one where there is no registry either")
        if answer.returncode:
            pytest.skip(f"`docker {command}` fails: {answer.stderr.strip().splitlines()[-1]}")


@dataclass
class Checkout:
    """A clone with what people leave in one, and the commands that are typed there."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *command: str, seconds: float = RUN_SECONDS, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | self.variables | variables
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=seconds)

    def compose(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self("docker", "compose", *words, **variables)

    def docker(self, *words: str) -> str:
        """What a command that succeeds prints."""
        answer = self("docker", *words)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()


@pytest.fixture(scope="session")
def image(engine: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Checkout]:
    """The image from a clone that also holds data, results and secrets; its time and size are shown."""
    folder = tmp_path_factory.mktemp("image") / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    changed = subprocess.run(["git", "ls-files", "-mo", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in changed.stdout.splitlines():  # what is not committed yet
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    for name in (
        "secret.env",
        "train/.netrc",
        "configs/secret.env",
        "outputs/old/config.yaml",
        "data/train.csv",
        "deploy/wandb.key",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"WANDB_API_KEY={LEFT_LYING}\n")
    if os.getuid() == 0:
        shutil.chown(folder / "outputs", *map(int, USER.split(":")))
    overriding = os.environ.get("COMPOSE_FILE", "docker-compose.gpu.yml")
    checkout = Checkout(folder, {"IMAGE": TAG, "RUN_AS": USER, "COMPOSE_FILE": overriding, "COMPOSE_PROJECT_NAME": TAG})
    start = time.monotonic()
    arguments = ["--build-arg", f"LOCKSTEP_COMMIT={COMMIT}"]
    arguments += ["--build-arg", f"CUDA_IMAGE={base}"] if (base := os.environ.get("CUDA_IMAGE")) else []
    output = f"type=image,name={TAG},compression=uncompressed"  # packing 6 GB takes longer than making them
    built = checkout("docker", "buildx", "build", "--network", "host", *arguments, "--output", output, ".", seconds=BUILD_SECONDS)
    assert built.returncode == 0, built.stderr
    size = int(checkout.docker("image", "inspect", "--format", "{{.Size}}", TAG))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nimage: {size / 1e9:.2f} GB, built in {time.monotonic() - start:.0f} s")
    yield checkout
    checkout.compose("--profile", "*", "down", "--volumes", "--timeout", "5")


@pytest.fixture
def run(image: Checkout) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`docker compose run --rm SERVICE ...` in the clone."""

    def command(service: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return image.compose("run", "--rm", "-T", service, *words, **variables)

    return command
