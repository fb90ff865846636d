"""Kills and disks that refuse."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from snapshots import assert_is_snapshot, snapshot

from train.checkpoint import Snapshot, clean, damage, latest, prune, read, steps, write
from train.errors import RunError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_that_is_chosen(tmp_path: Path, kills: int) -> None:
    write(tmp_path, snapshot(1, megabytes=30))
    command = [sys.executable, str(Path(__file__).with_name("writers.py")), str(tmp_path)]
    moments = random.Random(17)
    reached, wrecks = 1, 0
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin
        assert starter.stdout
        for _ in range(kills):
            print("start", file=starter.stdin, flush=True)
            writer = int(starter.stdout.readline())
            wait_for(lambda: any(tmp_path.glob(".step-*")))
            time.sleep(moments.uniform(0, 0.3))
            os.kill(writer, signal.SIGKILL)
            assert int(starter.stdout.readline()) == -signal.SIGKILL, "the writer must have been alive until the kill"
            assert all(damage(path) is None for path in steps(tmp_path).values()), "no half one under a final name"
            wrecks += len(clean(tmp_path))
            assert not [*tmp_path.glob(".*")]
            path, damaged = latest(tmp_path)
            assert damaged == {}
            assert path is not None
            step = read(path).step
            assert_is_snapshot(path, step)
            assert step >= reached, "work that was saved is lost"
            reached = step
    assert wrecks >= kills // 4, "the kills must fall within saves, or this test shows nothing"
    assert reached > kills // 10, "saves must get done between the kills"


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.001)


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, snapshot(8))
    (tmp_path / "step-00000008").rename(tmp_path / ".step-00000008.old-4711")
    (tmp_path / ".step-00000008.tmp-4711").mkdir()
    assert clean(tmp_path) == [".step-00000008.tmp-4711"]
    assert_is_snapshot(tmp_path / "step-00000008", 8)


def test_wrecks_are_removed_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, snapshot(8))
    for name in (".step-00000009.tmp-1", ".step-00000008.old-1", ".step-mine", "step-notes", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000009.tmp-1" / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path) == (tmp_path / "step-00000008", {})
    assert clean(tmp_path) == [".step-00000008.old-1", ".step-00000009.tmp-1"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000008", ".step-mine", "step-notes", "notes"}


def test_a_wreck_of_the_same_process_number_is_no_obstacle(tmp_path: Path) -> None:
    """In a container every run is process 1."""
    (tmp_path / f".step-00000002.tmp-{os.getpid()}" / "junk").mkdir(parents=True)
    (tmp_path / f".step-00000002.old-{os.getpid()}" / "junk").mkdir(parents=True)
    for _ in range(2):
        assert_is_snapshot(write(tmp_path, snapshot(2)), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """1 MB a file, as `ulimit -f` sets it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_refused_and_the_old_one_stays(folder: Path, refused: Snapshot, message: str) -> None:
    before = contents(folder)
    with pytest.raises(RunError, match=message) as refusal:
        write(folder, refused)
    assert str(folder / f"step-{refused.step:08d}") in str(refusal.value)
    assert contents(folder) == before
    assert not [*folder.glob(".*")], "the half-written folder must be gone"
    assert latest(folder)[0] == folder / "step-00000001"


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "new"])
@pytest.mark.usefixtures("file_size_limit")
def test_a_limit_on_file_sizes_leaves_the_old_checkpoint(tmp_path: Path, step: int) -> None:
    write(tmp_path, snapshot(1))
    message = r"File too large[^$]*needs 3\.0 MB; [\d,.]+ MB are free[^$]*ulimit -f"
    assert_refused_and_the_old_one_stays(tmp_path, snapshot(step, megabytes=3), message)


def test_a_full_disk_leaves_the_old_checkpoint_and_says_what_is_needed_and_free(small_disk: Path) -> None:
    write(small_disk, snapshot(1, megabytes=3))
    assert_refused_and_the_old_one_stays(
        small_disk,
        snapshot(2, megabytes=6),
        r"No space left on device[^$]*needs 6\.0 MB; 5\.\d MB are free[^$]*Make room there.*type the same command again",
    )
    prune(small_disk, written=1, keep=1, best=None)
    assert_is_snapshot(small_disk / "step-00000001", 1)
    assert_is_snapshot(write(small_disk, snapshot(2, megabytes=4)), 2)  # fits beside the old one


def test_a_read_only_disk_is_refused_in_words(small_disk: Path) -> None:
    for step in (0, 1):
        write(small_disk, snapshot(step))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_refused_and_the_old_one_stays(small_disk, snapshot(2), r"Read-only file system[^$]*Make the folder writable")
    with pytest.raises(RunError, match=r"cannot remove the old checkpoint .*step-00000000: Read-only"):
        prune(small_disk, written=1, keep=1, best=None)


def test_a_run_folder_that_has_gone_is_not_made_again_in_silence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RunError, match=r"No such file or directory[^$]*was removed or replaced"):
        write(run / "checkpoints", snapshot(1))
    assert not run.exists()


def test_a_file_in_the_folders_place_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(RunError, match=r"cannot save .*checkpoints/step-00000001"):
        write(tmp_path / "checkpoints", snapshot(1))
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_saving_makes_no_second_copy_of_the_tensors(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
import torch
from train.checkpoint import Snapshot, damage, write
tensors = {"model": {"a": torch.ones(75_000_000)}}
write(Path(sys.argv[1]), Snapshot(1, {"model": {"a": torch.ones(9)}}, {}))  # whatever is loaded lazily
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert damage(write(Path(sys.argv[1]), Snapshot(2, tensors, {}))) is None
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    kilobytes = int(subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=True).stdout)
    assert kilobytes < 50_000, "300 MB are written"


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path, snapshot(1))
    with pytest.raises(TypeError, match="JSON"):
        write(tmp_path, Snapshot(2, {}, {"config": object()}))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
