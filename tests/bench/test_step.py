"""`train bench step` and `input` as a person calls them: what they measure is what passes and samples are made to cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests import made
from tests.bench.test_scaling import MODEL, ended
from tests.conftest import Launched
from train.bench.feed import wait

Launch = Callable[..., Launched]
PASS_SECONDS, SAMPLE_SECONDS = 0.1, 0.05  # far above all else
SLOW = "data.transforms.train=['tests.spies_failure:SlowPicture']"


def bench(launch: Launch, tmp_path: Path, verb: str, *words: str) -> str:
    """What it says of batches of two lanes with two samples each."""
    made.shards(tmp_path / "set", [13, 11])
    settings = (made.config(tmp_path), MODEL, "batch.size=4", "batch.lanes=2", f"run.output_dir={tmp_path / 'outputs'}", SLOW)
    options = ("--rounds", "2", "--steps", "2", *words)
    seconds = {"SPY_SECONDS": str(PASS_SECONDS), "SPY_SAMPLE_SECONDS": str(SAMPLE_SECONDS)}
    code, output = ended(launch("python", "-m", "train", "bench", verb, *settings, "epochs=5", *options, env=seconds))
    assert code == 0, output
    assert not (tmp_path / "outputs").exists()
    return output


def numbers(output: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output[output.index("{") :])
    return found


def test_a_step_is_measured_in_memory_with_its_input_and_with_logging(launch: Launch, tmp_path: Path) -> None:
    found = numbers(bench(launch, tmp_path, "step", "data.workers=0", "--json"))
    seconds = {name: median(times) for name, times in found["seconds"].items()}
    passes, decoding = 2 * PASS_SECONDS, 4 * SAMPLE_SECONDS
    assert list(seconds) == ["data in memory", "with input", "with input, and logged", "run.determinism=fast"]
    assert passes < seconds["data in memory"] < passes + 0.1
    assert passes < seconds["run.determinism=fast"] < passes + 0.1
    for name in ("with input", "with input, and logged"):
        assert passes + decoding < seconds[name] < passes + decoding + 0.1
        assert found["samples_per_second"][name] == 4 / seconds[name]
    assert found["times_data_in_memory"]["run.determinism=fast"] == [
        one / other
        for one, other in zip(found["seconds"]["run.determinism=fast"], found["seconds"]["data in memory"], strict=True)
    ]
    assert list(found["memory_gib"]) == ["data in memory", "run.determinism=fast"]
    assert all(0.1 < memory < 4 for memory in found["memory_gib"].values())


@pytest.mark.slow
def test_other_settings_take_turns_each_with_its_own_time_and_memory(launch: Launch, tmp_path: Path) -> None:
    settings = ("batch.lanes=1 batch.size=2", "speed.precision=bf16", "model.width=8000")
    options = [word for variant in settings for word in ("--with", variant)]
    found = numbers(bench(launch, tmp_path, "step", "data.workers=0", "--json", *options))
    assert list(found["seconds"])[3:] == list(settings)
    one, bf16, wide = [found["times_data_in_memory"][name] for name in settings]
    assert all(0.4 < ratio < 0.75 for ratio in one)  # one pass instead of two
    assert all(0.9 < ratio < 1.5 for ratio in bf16)
    # a matrix of 8,000 x 8,000 with its gradient and its momentum, or more
    assert found["memory_gib"][settings[2]] - found["memory_gib"]["data in memory"] > 3 * 8000**2 * 4 / 2**30
    assert len(wide) == 2


@pytest.mark.slow
def test_settings_that_cannot_be_are_told_together_with_what_asked_for_them(launch: Launch, tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [13])
    options = ("--with", "speed.precison=bf16", "--with", "model.width='", "--with", "run.threads=1")
    code, output = ended(launch("python", "-m", "train", "bench", "step", made.config(tmp_path), MODEL, "steps=1", *options))
    assert code == 2 and "Traceback" not in output
    assert "--with speed.precison=bf16: command line" in output and "did you mean speed.precision?" in output
    assert "--with model.width=': No closing quotation" in output


@pytest.mark.slow
def test_input_is_measured_by_itself_with_each_number_of_workers(launch: Launch, tmp_path: Path) -> None:
    output = bench(launch, tmp_path, "input", "--workers", "2,0")
    rows = re.findall(
        r"^ +(\d)(?: \(data.workers\))? +([\d.]+)(?: \(.*?\))? +([\d.]+) +([\d.]+) ms, ([\d.]+)% of the time",
        output,
        re.MULTILINE,
    )
    [none, two] = [[float(cell) for cell in row] for row in rows]
    assert [none[0], two[0]] == [0, 2]
    alone = 1000 * 4 * SAMPLE_SECONDS
    assert alone < none[2] < 1.2 * alone and none[3] == none[2]  # all of it is waited for
    assert alone / 2 < two[2] < 1.4 * alone / 2 and two[3] == two[4] == 0
    assert none[1] == pytest.approx(4000 / none[2], rel=0.01)
    [step] = re.findall(r"wait beside a step of ([\d.]+) ms", output)
    assert none[4] == pytest.approx(100 * none[3] / (none[3] + float(step)), abs=0.1)


def test_the_wait_is_what_the_input_takes_longer_than_the_step() -> None:
    assert wait(0.3, 0.2, 1) == pytest.approx(0.1)
    assert wait(0.1, 0.2, 1) == 0
    assert wait(0.1, 0.2, 0) == 0.1
