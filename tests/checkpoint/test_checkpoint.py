import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from snapshots import assert_is_snapshot, snapshot

from train.checkpoint import Snapshot, clean, damage, latest, prune, read, steps, write
from train.errors import RunError


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", snapshot(120))
    assert path == tmp_path / "checkpoints" / "step-00000120"
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors",
        "ema.safetensors",
        "state.json",
        "checksums.json",
    }
    assert latest(tmp_path / "checkpoints") == (path, {})
    assert_is_snapshot(path, 120)


def test_checksums_are_those_that_sha256sum_prints(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(1))
    listed = json.loads((path / "checksums.json").read_text())
    printed = subprocess.run(["sha256sum", *listed], cwd=path, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1]: line.split()[0] for line in printed.splitlines()} == {
        name: entry["sha256"] for name, entry in listed.items()
    }
    assert listed.keys() == {"model.safetensors", "ema.safetensors", "state.json"}


def test_numbers_in_the_state_keep_every_bit_also_numpy_ones(tmp_path: Path) -> None:
    state = {"loss": 0.1 + 0.2, "best": float("inf"), "seed": 2**63, "accuracy": np.float32(0.1), "count": np.int64(3)}
    loaded = read(write(tmp_path, Snapshot(1, {}, state))).state
    assert loaded == {
        "loss": 0.30000000000000004,
        "best": float("inf"),
        "seed": 9223372036854775808,
        "accuracy": 0.10000000149011612,  # the float32 nearest to 0.1
        "count": 3,
    }


@pytest.mark.parametrize("last", [9, 999, 99_999_999])
def test_steps_sort_as_numbers_where_names_would_not(tmp_path: Path, last: int) -> None:
    for step in (last + 1, last, last - 1):
        write(tmp_path, snapshot(step))
    assert [*steps(tmp_path)] == [last - 1, last, last + 1]
    found, _ = latest(tmp_path)
    assert found is not None
    assert_is_snapshot(found, last + 1)
    assert prune(tmp_path, written=last + 1, keep=2, best=None) == [last - 1]
    assert [*steps(tmp_path)] == [last, last + 1]


def test_there_is_no_latest_in_an_empty_or_absent_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) == latest(tmp_path / "absent") == (None, {})
    assert clean(tmp_path / "absent") == []


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    first = snapshot(7)
    write(tmp_path, Snapshot(7, {**first.tensors, "stale": {"a": torch.ones(1)}}, {"position": 0}))
    assert_is_snapshot(write(tmp_path, first), 7)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


# Damage


def empty(path: Path) -> None:
    """Put an empty folder in the place of a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir()


def cut(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size - size)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0\0")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors is missing": lambda path: (path / "model.safetensors").unlink(),
    "state.json is missing": lambda path: (path / "state.json").unlink(),
    "checksums.json is missing": lambda path: (path / "checksums.json").unlink(),
    "checksums.json is missing (all is)": empty,
    "model.safetensors: 1 byte short": lambda path: cut(path / "model.safetensors", 1),
    "ema.safetensors: 2 bytes too long": lambda path: append(path / "ema.safetensors"),
    "model.safetensors: its bytes have changed (SHA-256 differs)": lambda path: flip(path / "model.safetensors", -1),
    "state.json: its bytes have changed (SHA-256 differs)": lambda path: flip(path / "state.json", 12),
    "checksums.json is garbled": lambda path: cut(path / "checksums.json", 1),
    "checksums.json is garbled (not text)": lambda path: (path / "checksums.json").write_bytes(b"\xff\0"),
    "checksums.json is garbled (other JSON)": lambda path: (path / "checksums.json").write_text('["a"]'),
    "checksums.json does not list state.json": lambda path: (path / "checksums.json").write_text("{}"),
    "checksums.json cannot be read (Is a directory)": lambda path: empty(path / "checksums.json"),
}


@pytest.mark.parametrize(("reason", "spoil"), DAMAGES.items(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(
    tmp_path: Path, reason: str, spoil: Callable[[Path], object]
) -> None:
    for step in (100, 110, 120):
        write(tmp_path, snapshot(step))
    spoil(tmp_path / "step-00000120")
    found, damaged = latest(tmp_path)
    assert [*damaged] == [120]
    assert damaged[120] == reason.split(" (all")[0].split(" (not")[0].split(" (other")[0]
    assert found == tmp_path / "step-00000110"
    assert_is_snapshot(found, 110)


def test_no_flipped_byte_of_the_checksums_lets_other_contents_pass(tmp_path: Path) -> None:
    path = write(tmp_path, snapshot(1))
    checksums = path / "checksums.json"
    original = checksums.read_bytes()
    passed = []
    for offset in range(len(original)):
        flip(checksums, offset)
        if damage(path) is None:
            passed.append(original[offset : offset + 1])
        checksums.write_bytes(original)
    assert set(passed) <= {b" ", b"\n"}, "only white space may change unnoticed"
    assert damage(path) is None


def test_when_all_are_damaged_there_is_none_and_every_reason(tmp_path: Path) -> None:
    for step in (1, 2):
        cut(write(tmp_path, snapshot(step)) / "ema.safetensors", step)
    assert latest(tmp_path) == (None, {2: "ema.safetensors: 2 bytes short", 1: "ema.safetensors: 1 byte short"})


# Foreign files


class Bomb:
    """What an attacker plants: unpickling it creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "checksums.json", "random_states_0.pkl", "extra.pt"])
def test_a_planted_pickle_is_never_run(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, snapshot(1))
    (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    if name.endswith((".pkl", ".pt")):
        assert_is_snapshot(path, 1)
    else:
        assert latest(tmp_path)[0] is None
        with pytest.raises(RunError, match=r"step-00000001.* is not a"):
            read(path)
    assert not (tmp_path / "harm").exists()
    pickle.loads((path / name).read_bytes())
    assert (tmp_path / "harm").exists(), "the bomb must be a real one"


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"absent is not a checkpoint"):
        read(tmp_path / "absent")


# Retention


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 13):
        write(tmp_path, snapshot(step))
        prune(tmp_path, written=step, keep=2, best=3 if step >= 3 else None)
    assert [*steps(tmp_path)] == [3, 11, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000011", "step-00000012"]
    assert prune(tmp_path, written=12, keep=2, best=12) == [3]


def test_after_going_back_the_new_saves_win_and_the_only_good_one_stays(tmp_path: Path) -> None:
    for step in (100, 110, 120):
        write(tmp_path, snapshot(step))
    cut(tmp_path / "step-00000120" / "model.safetensors", 1)
    cut(tmp_path / "step-00000110" / "model.safetensors", 1)
    assert latest(tmp_path)[0] == tmp_path / "step-00000100"
    write(tmp_path, snapshot(105))  # the run has gone on from 100
    assert prune(tmp_path, written=105, keep=1, best=None) == [100, 110, 120]
    found, damaged = latest(tmp_path)
    assert found is not None
    assert_is_snapshot(found, 105)
    assert damaged == {}
