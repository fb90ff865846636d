"""`train doctor` says what a machine has, and the mend of what it has not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.conftest import HANG_SECONDS, Launched
from train import cli
from train.doctor import gpu, machine, software, speed
from train.doctor.cards import published
from train.driver import Driver

SECTIONS = ["GPU", "Machine", "Container", "Folders", "Software", "Speed"]


def examine(*options: str) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *options])


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for section in json.loads(result.stdout).values() for finding in section}


@pytest.fixture(scope="module")
def screen(request: pytest.FixtureRequest) -> Result:
    return examine("--json")


def test_json_has_each_section_and_what_this_machine_has(screen: Result) -> None:
    assert list(json.loads(screen.stdout)) == SECTIONS
    found = findings(screen)
    assert f"{len(os.sched_getaffinity(0))} cores usable" in found["CPU"]["found"]
    total = int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) / 2**20
    assert f"of {total:.1f} GiB available" in found["memory"]["found"]
    assert {finding["state"] for finding in found.values()} <= {"ok", "note", "warning", "failed"}
    assert all(finding["mend"] for finding in found.values() if finding["state"] != "ok")


def test_speeds_are_those_of_a_machine(screen: Result) -> None:
    """Between what any machine of the last ten years reaches and what none does."""
    units = {"G": 1e9, "T": 1e12}
    rates = {name: line["found"].split()[:2] for name, line in findings(screen).items() if name.startswith(("CPU ", "GPU 0 "))}
    assert {name.split()[-1] for name in rates} >= {"copy", "fp32", "bf16"}
    for name, (number, unit) in rates.items():
        assert 1e7 < float(number) * units[unit[0]] < 1e16, name


def test_the_screen_shows_a_line_and_its_mend(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = f"{tmp_path}/file/cache"
    launched = launch("python", "-m", "train", "doctor", "--quick", env={"HF_HOME": place})
    assert launched.process.wait(HANG_SECONDS) == 1
    lines = launched.output.splitlines()
    [at] = [number for number, line in enumerate(lines) if line.startswith("  failed")]
    assert lines[at].split() == ["failed", "data", "cache", place, "cannot", "be", "written"]
    assert lines[at + 1].strip().startswith(f"-> make {tmp_path}/file a folder that uid ")
    assert "\x1b" not in launched.output  # no colours but on a terminal


def test_versions_that_are_not_those_of_the_lock_are_named(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("click==1.2.3 \\\n    --hash=sha256:00\nno-such-package==1 \\\n    --hash=sha256:00\n")
    found = software.packages(lock)
    assert found.state == "warning"
    assert re.search(r"not as in the lock: click \S+ \(pinned: 1\.2\.3\)$", found.found)
    assert software.packages(tmp_path / "missing").state == "note"


def test_this_environment_is_that_of_the_lock(screen: Result) -> None:
    assert findings(screen)["versions"]["state"] == "ok"


def test_little_shared_memory_is_told(tmp_path: Path) -> None:
    missing = machine.shared_memory(tmp_path / "missing")
    assert (missing.state, missing.mend) == ("failed", "mount a tmpfs there")
    assert "--shm-size" in machine.shared_memory(Path("/proc")).mend  # a file system without any room


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A10", 600),
        ("NVIDIA A10G", 600),
        ("NVIDIA L4", 300),
        ("NVIDIA L40S", 864),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("Tesla T4", 320),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_gives(name: str, memory: float) -> None:
    """The memory's rate in GB/s as the maker's data sheet has it."""
    card = published(name)
    assert card is not None
    assert card.memory == memory


@pytest.mark.parametrize("name", ["NVIDIA A1000", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D", "AMD Instinct MI300X"])
def test_a_card_that_is_not_in_the_table_has_no_figures(name: str) -> None:
    assert published(name) is None


BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((7, 0), BUILT, False),  # Volta: older than all
        ((7, 5), BUILT, True),
        ((8, 9), BUILT, True),  # Ada runs what is made for Ampere
        ((10, 3), BUILT, True),
        ((11, 0), BUILT, False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((11, 0), [*BUILT, "compute_100"], True),  # compiled when it is loaded
    ],
)
def test_kernels_run_on_later_cards_of_their_generation(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert gpu.has_kernels(capability, built) == runs


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with a card that is well and one that somebody holds exclusively, as torch tells of them."""
    facts = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)

    def memory(number: int) -> tuple[int, int]:
        if number == 1:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be")
        return 21 * 2**30, 22 * 2**30

    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda number: facts,
        "get_device_name": lambda number: facts.name,
        "get_arch_list": lambda: BUILT,
        "mem_get_info": memory,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", answer)
    monkeypatch.setattr("train.driver.find", lambda: Driver("580.95.05", (13, 0)))


def test_a_card_that_cannot_be_used_does_not_hide_the_others(two_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"copy_rate": 100e9, "matmul_rate": 25e12, "from_host": 12e9}
    for name, rate in rates.items():
        monkeypatch.setattr(f"train.doctor.speed.{name}", lambda *_, rate=rate: rate)
    examined = examine("--json")
    assert examined.exit_code == 1
    found = findings(examined)
    assert found["GPU 0"]["found"] == "NVIDIA L4 (compute capability 8.9), 21.0 GiB of 22.0 GiB free"
    assert found["GPU 1"]["found"] == "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"
    assert "holds it exclusively" in found["GPU 1"]["mend"]
    assert found["GPU 0 copy"] == {
        "subject": "GPU 0 copy",
        "state": "warning",
        "found": "100 GB/s, 33% of the 300 GB/s published",
        "mend": found["GPU 0 copy"]["mend"],
    }
    assert found["GPU 0 fp32"]["found"] == "25 TFLOP/s, 83% of the 30.3 TFLOP/s published"
    assert not [subject for subject in found if subject.startswith("GPU 1 ")]


def test_a_measurement_that_fails_leaves_the_others(two_cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr("train.doctor.speed.copy_rate", full)
    monkeypatch.setattr("train.doctor.speed.matmul_rate", lambda *_: 25e12)
    monkeypatch.setattr("train.doctor.speed.from_host", lambda *_: 12e9)
    found = {finding.subject: finding for finding in speed.speed()}
    assert (found["GPU 0 copy"].state, found["GPU 0 fp32"].state) == ("failed", "ok")
