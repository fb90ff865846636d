"""One thing is changed between a run and its verification: each has its verdict, its cause by name and its exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import Result

from tests import left
from tests.conftest import HANG_SECONDS, ROOT, Runner
from tests.receipt.runs import DIFFERENT, IDENTICAL, SHORT, TOLERATED, UNKNOWN, diff, rewrite, trained, verify
from train.receipt import document


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A run on 128 of the digits, which each epoch of two steps shows all; nothing in their files is packed."""
    train = Runner(tmp_path_factory.mktemp("run"))
    (train.folder / "data").mkdir()
    for number, shard in enumerate(sorted((ROOT / "train/data/digits").glob("train-*"))[:2]):
        rows = pq.read_table(shard).slice(0, 64)
        path = train.folder / "data" / f"train-0000{number}-of-00002.parquet"
        pq.write_table(rows, path, compression="none", use_dictionary=False, write_statistics=False)
    return trained(train, f"data.path={train.folder / 'data'}")


@pytest.fixture
def copy(run: Runner, tmp_path: Path) -> Runner:
    """The same, to be changed."""
    shutil.copytree(run.folder, tmp_path / "copy")
    return Runner(tmp_path / "copy")


def causes(found: Result) -> list[str]:
    """What a verdict names as different: `subject: what: then -> now`."""
    return [line.strip() for line in found.output.splitlines() if line.startswith("  ") and " -> " in line and "step" not in line]


@pytest.mark.slow
def test_nothing(run: Runner) -> None:
    found = verify(run)
    assert (found.exit_code, causes(found)) == (IDENTICAL, []), found.output
    assert "IDENTICAL: from the beginning to step 8" in found.output


def test_a_byte_of_the_data(copy: Runner) -> None:
    """The label of the last row: 8 bytes at the end of its column."""
    shard = copy.folder / "data" / "train-00000-of-00002.parquet"
    footer = pq.ParquetFile(shard).metadata.row_group(0)
    [column] = [footer.column(number) for number in range(footer.num_columns) if footer.column(number).path_in_schema == "label"]
    last = column.data_page_offset + column.total_compressed_size - 8
    content = bytearray(shard.read_bytes())
    assert content[last] == pq.read_table(shard)["label"][-1].as_py()
    content[last] ^= 1
    shard.write_bytes(content)
    found = verify(copy, "--data", str(copy.folder / "data"))
    assert found.exit_code == DIFFERENT, found.output
    assert "first difference at step 2: samples" in found.output
    assert [cause.partition(": ")[2].partition(": ")[0] for cause in causes(found)] == ["beginnings and ends of the files"]


@pytest.mark.slow
def test_a_data_file_that_cannot_be_read_any_more(copy: Runner) -> None:
    shard = copy.folder / "data" / "train-00000-of-00002.parquet"
    content = shard.read_bytes()
    place = content.rindex(b"IDAT")  # of the last picture
    shard.write_bytes(content[:place] + b"idat" + content[place + 4 :])
    found = verify(copy, "--data", str(copy.folder / "data"))
    assert found.exit_code == UNKNOWN, found.output
    assert "train-00000-of-00002.parquet" in found.output and "data.on_error=skip" in found.output
    assert "data: beginnings and ends of the files: " in found.output


@pytest.mark.slow
def test_the_name_of_a_data_file(copy: Runner) -> None:
    for shard in (copy.folder / "data").iterdir():
        shard.rename(shard.with_name(shard.name.replace("of-00002", "of-2")))
    found = verify(copy, "--data", str(copy.folder / "data"))
    assert found.exit_code == IDENTICAL, found.output
    assert [cause.split(": ")[1] for cause in causes(found)] == ["names of the files"]


@pytest.mark.slow
def test_a_comment_in_the_configuration(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "commented.yaml").write_text(f"# a comment\nbase: {ROOT / 'configs/digits.yaml'}\n")
    commented = trained(Runner(tmp_path), str(tmp_path / "commented.yaml"), f"data.path={run.folder / 'data'}")
    found = diff(run, commented)
    assert (found.exit_code, causes(found)) == (IDENTICAL, []), found.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "code", "cause"),
    [
        ("optimizer.lr=0.003", DIFFERENT, "config: optimizer.lr: 0.004 -> 0.003"),
        ("batch.lanes=2", DIFFERENT, "lanes: batch.lanes: 4 -> 2"),
        ("run.seed=1", DIFFERENT, "config: run.seed: 0 -> 1"),
    ],
)
def test_a_value_of_the_configuration(run: Runner, tmp_path: Path, setting: str, code: int, cause: str) -> None:
    found = diff(run, trained(Runner(tmp_path), f"data.path={run.folder / 'data'}", setting))
    assert (found.exit_code, causes(found)) == (code, [cause]), found.output


CHANGES: dict[str, Callable[[Path], Any]] = {
    "tracked": lambda code: (code / "train/seeds.py").write_text((code / "train/seeds.py").read_text() + "\n# a thought\n"),
    "untracked": lambda code: (code / "train/models/mine.py").write_text(""),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_of_the_code(run: Runner, tmp_path: Path, change: str) -> None:
    """In a clone elsewhere, by another user of another host: the run's own code is taken, or this one where that is asked for."""
    clone = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True).stdout[:12]
    CHANGES[change](clone)
    environment = {**os.environ, "USER": "stranger", "HOSTNAME": "elsewhere", "TZ": "Asia/Tokyo", "PYTHONPATH": ""}
    words = [sys.executable, "-m", "train", "verify", str(left.folder(run) / document.NAME)]
    for option, cause in ((), ""), (("--here",), f"code: {head}"):
        found = subprocess.run(
            [*words, *option], cwd=clone, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert found.returncode == IDENTICAL, found.stdout + found.stderr
        assert ("as the receipt has it, and not this checkout's" in found.stderr) == (not option)
        assert (f"{cause} -> {head} with changes" in found.stdout) == bool(option), found.stdout


@pytest.mark.slow
def test_the_version_of_a_library(copy: Runner) -> None:
    """A receipt of a machine with another patch version of torch, whose losses are the same, or a little different."""

    def version(receipt: dict[str, Any]) -> None:
        receipt["environments"][-1]["versions"]["packages"]["torch"] = "2.12.9"

    def numbers(receipt: dict[str, Any]) -> None:
        for entry in receipt["trace"][2:]:
            entry[1] *= 1.001
        receipt["checkpoints"][-1]["weights_sha256"] = receipt["result"]["weights_sha256"] = "0" * 64

    rewrite(copy, version)
    found = verify(copy)
    assert found.exit_code == IDENTICAL, found.output
    assert [cause.split(" -> ")[0] for cause in causes(found)] == ["versions: torch: 2.12.9"]
    rewrite(copy, numbers)
    found = verify(copy)
    assert found.exit_code == TOLERATED, found.output
    assert "WITHIN TOLERANCE" in found.output and "losses within 5%" in found.output
    assert "first difference at step 6: loss" in found.output
    assert [cause.split(" -> ")[0] for cause in causes(found)] == ["versions: torch: 2.12.9"]


@pytest.mark.slow
def test_the_threads(run: Runner, tmp_path: Path) -> None:
    """Those of the machine change nothing; others that a configuration asks for are named."""
    data = f"data.path={run.folder / 'data'}"
    wide = "model={name: tests.spies_failure:Averaging}"  # whose sums depend on the threads
    runs = [
        Runner(tmp_path / name, {"OMP_NUM_THREADS": threads}) for name, threads in (("one", "1"), ("two", "2"), ("said", "2"))
    ]
    for train, threads in zip(runs, ("auto", "auto", "2"), strict=True):
        train.folder.mkdir()
        trained(train, data, wide, f"run.threads={threads}")
    found = diff(*runs[:2])
    assert (found.exit_code, causes(found)) == (IDENTICAL, ["variables: OMP_NUM_THREADS: 1 -> 2"]), found.output
    found = diff(runs[0], runs[2])
    assert found.exit_code == TOLERATED, found.output
    assert {"config: run.threads: auto -> 2", "CPU: threads: 1 -> 2"} <= set(causes(found))


@pytest.mark.slow
def test_an_accelerate_config_that_lay_in_the_home_folder(run: Runner, tmp_path: Path) -> None:
    """It is named where it differs; a re-run takes the receipt's settings, and not those that lie there."""
    data = f"data.path={run.folder / 'data'}"
    precise = Runner(tmp_path / "run", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    precise.folder.mkdir()
    found = diff(run, trained(precise, data))
    assert (found.exit_code, causes(found)) == (DIFFERENT, ["accelerate: precision: no -> bf16"]), found.output
    home = tmp_path / "home"
    (home / "accelerate").mkdir(parents=True)
    (home / "accelerate" / "default_config.yaml").write_text("mixed_precision: bf16\nnum_processes: 1\n")
    words = [sys.executable, "-m", "train", "verify", str(left.folder(run))]
    environment = {**os.environ, "HF_HOME": str(home)}
    again = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert again.returncode == IDENTICAL, again.stdout + again.stderr


@pytest.mark.slow
def test_where_it_was_stopped(run: Runner, tmp_path: Path) -> None:
    """Three times, each time gone on with on another number of processes."""
    data = f"data.path={run.folder / 'data'}"
    train = Runner(tmp_path)
    for stop, processes in ((2, 1), (3, 2), (6, 4)):
        assert train.run(*SHORT, data, "--stop-at", str(stop), processes=processes).code == 75
    trained(train, data)
    assert diff(run, train).exit_code == IDENTICAL
    found = verify(train)
    assert found.exit_code == IDENTICAL, found.output
