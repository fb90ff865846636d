"""`train doctor` says what a machine has, and the mend of what it has not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.conftest import HANG_SECONDS, Launched
from train import cli
from train.doctor import machine, software
from train.doctor.cards import published

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
    assert all(finding["mend"] for finding in found.values() if finding["state"] != "ok" and finding["subject"] != "versions")


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
        ("Tesla V100-SXM2-32GB", 900),
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
