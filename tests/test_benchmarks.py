"""The scripts of benchmarks/ run, and what they say goes into their section of RESULTS.md and nowhere else."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.bench.test_scaling import ended
from tests.conftest import ROOT, Launched

sys.path.insert(0, str(ROOT / "benchmarks"))
import results

Launch = Callable[..., Launched]
DIGITS = "configs/digits.yaml"


def test_a_section_replaces_the_one_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FILE", tmp_path / "RESULTS.md")
    for heading, text in (("Input", "one"), ("Step", "two\n"), ("Input speed", "three"), ("Input", "four")):
        results.record(heading, text)
    assert (tmp_path / "RESULTS.md").read_text() == (
        f"{results.BEGINNING}\n## Input\n\nfour\n\n## Step\n\ntwo\n\n## Input speed\n\nthree\n"
    )


def test_every_section_of_the_shipped_results_is_one_that_a_script_writes() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "benchmarks" / "RESULTS.md").read_text(), re.MULTILINE)
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    recorded = "".join(re.findall(r"results\.record\(.*", scripts))
    assert sections and len(sections) == len(set(sections))
    assert not [section for section in sections if f'"{section}"' not in recorded]


def measured(launch: Launch, tmp_path: Path, *command: str) -> dict[str, list[str]]:
    """The table, by its first column, of the only section that a script has written in a copy of the checkout."""
    for folder in ("train", "configs", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__", "RESULTS.md"))
    code, output = ended(launch("python", *command, cwd=tmp_path / "copy"))
    assert code == 0, output
    section = (tmp_path / "copy" / "benchmarks" / "RESULTS.md").read_text().removeprefix(results.BEGINNING)
    heading, _, text = section.strip().partition("\n\n")
    assert heading.startswith("## ") and "\n## " not in text
    assert text in output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[2:]}


def middle(cell: str) -> float:
    return float(cell.split(" ")[0].rstrip("%"))


@pytest.mark.slow
def test_the_loops_take_turns(launch: Launch, tmp_path: Path) -> None:
    table = measured(launch, tmp_path, "benchmarks/loop.py", "--rounds", "3", "--blocks", "1")
    assert set(table) == {"bare PyTorch loop", "Accelerate loop", "this trainer", "this trainer, no receipt"}
    assert middle(table["bare PyTorch loop"][1]) == 1
    assert all(0.2 < middle(row[1]) < 5 for row in table.values())


@pytest.mark.slow
def test_a_step_takes_what_its_activations_and_gradients_take(launch: Launch, tmp_path: Path) -> None:
    model = "model={name: 'benchmarks.saving:Large', millions: 20}"
    table = measured(launch, tmp_path, "benchmarks/memory.py", model, "optimizer={name: AdamW, lr: 1e-3}", "--rounds", "1")
    assert set(table) == {"bare PyTorch loop", "Accelerate loop", "this trainer"}
    parameters = 20e6 * 4 / 2**20
    for tensors, _, process, _ in table.values():
        assert 3 * parameters < middle(tensors) < 6 * parameters  # the gradient and two averages of it
        assert 3 * parameters < middle(process) < 6 * parameters


@pytest.mark.slow
def test_strict_is_compared_with_fast_and_switches_with_none(launch: Launch, tmp_path: Path) -> None:
    few = ("--rounds", "1", "--steps", "1")
    table = measured(launch, tmp_path / "one", "benchmarks/determinism.py", DIGITS, f"{DIGITS} batch.lanes=1", *few)
    assert list(table) == [f"`{DIGITS}`", f"`{DIGITS} batch.lanes=1`"]
    assert [row[0] for row in table.values()] == ["64 = 4 lanes", "64 = 1 lanes"]
    switches = ("--with", "speed.channels_last=true", "--with", "batch.size=512")
    table = measured(launch, tmp_path / "two", "benchmarks/switches.py", DIGITS, *switches, *few)
    assert list(table) == ["none", "`speed.channels_last=true`", "`batch.size=512`"]
    assert middle(table["none"][1]) == 1 and middle(table["`batch.size=512`"][1]) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["bare PyTorch loop", "Accelerate's loop", "Lightning", "transformers' Trainer", "timm"])
def test_whole_runs_of_ours_and_a_peer_are_compared(launch: Launch, tmp_path: Path, peer: str) -> None:
    package = {"Lightning": "lightning", "transformers' Trainer": "transformers", "timm": "timm"}.get(peer, "torch")
    pytest.importorskip(package)
    shades = bright_and_dark(tmp_path / "shades")
    command = ["benchmarks/run.py", str(shades), "--rounds", "1", "--epochs", "2", "--workers", "1"]
    code, output = ended(launch("python", *command, "--only", "Lockstep", "--only", peer))
    assert code == 0, output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("| ")]
    found = {row[0]: row[1:] for row in rows[2:]}
    assert set(found) == {"Lockstep", peer}
    assert all(middle(row[4]) > 90 for row in found.values())  # black and white are easily told apart
    assert found["Lockstep"][3] == "1"


def bright_and_dark(folder: Path) -> Path:
    """Ten classes in the way of MNIST, of which two have pictures: black ones and white ones, with noise."""
    folder.mkdir()
    names = [str(number) for number in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    noise = np.random.default_rng(0)
    for split, count in (("train", 640), ("test", 64)):
        rows = []
        for number in range(count):
            label = number % 2
            picture = (noise.integers(0, 60, (28, 28)) + 190 * label).astype(np.uint8)
            data = io.BytesIO()
            Image.fromarray(picture).save(data, "png")
            rows.append({"image": {"bytes": data.getvalue(), "path": None}, "label": label})
        table = datasets.Dataset.from_list(rows, features)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder
