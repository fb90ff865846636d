"""Which records each process reads next: claims about plans over real files, checked at every position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import made
from train.config.schema import Data
from train.data.order import map_order, shard_order
from train.data.pictures import open_pictures
from train.data.plan import Records, Share, epoch_length, evaluation_plan, first_records, readahead, rows_of, training_plan
from train.data.source import SHARD_BITS, Source, StreamSource

SHARDS = (10, 3, 7)
TOTAL = sum(SHARDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return {
        "parquet": made.shards(folder / "parquet", SHARDS),
        "jsonl": made.json_lines(folder / "jsonl", SHARDS),  # tells its sizes only by being read
        "folders": made.class_folders(folder / "folders", range(TOTAL)),
    }


@pytest.fixture(params=["parquet", "jsonl", "folders"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def opened(folder: Path) -> Source:
    """As a new process opens it."""
    sources, _ = open_pictures(Data(path=str(folder), classes=None if "folders" in folder.name else 3))
    return sources.train


def shares(batch: int, lanes: int, processes: int) -> list[Share]:
    local = lanes // processes
    micro = batch // lanes
    return [Share(batch, micro, range(rank * local, (rank + 1) * local)) for rank in range(processes)]


Sample = tuple[int, int]  # epoch, key


def samples(records: Records) -> list[Sample]:
    return list(zip(records.epochs.tolist(), records.keys.tolist(), strict=True))


def plan(source: Source, share: Share, position: int = 0, shuffle: bool = True, block: int = 6) -> Iterator[Records]:
    return training_plan(source, share, position, seed=0, shuffle=shuffle, block=block)


def stream(source: Source, count: int, position: int = 0, shuffle: bool = True, block: int = 6) -> list[Sample]:
    """The samples at the positions from `position` on."""
    found = plan(source, Share(1, 1, range(1)), position, shuffle, block)
    return [sample for records in itertools.islice(found, count) for sample in samples(records)]


def keys_of(source: Source) -> list[int]:
    return sorted(sample[1] for records in evaluation_plan(source, 4, 0, 1) for sample in samples(records))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block", [1, 6, 1000])
def test_each_epoch_has_each_sample_exactly_once(folder: Path, shuffle: bool, block: int) -> None:
    source = opened(folder)
    found = stream(source, 3 * TOTAL, shuffle=shuffle, block=block)
    assert [epoch for epoch, _ in found] == [0] * TOTAL + [1] * TOTAL + [2] * TOTAL
    orders = [[key for _, key in found[start : start + TOTAL]] for start in range(0, 3 * TOTAL, TOTAL)]
    assert [sorted(order) for order in orders] == [keys_of(source)] * 3
    assert len(keys_of(source)) == TOTAL
    if not shuffle:
        assert orders == [keys_of(source)] * 3
    elif block > 1:  # in blocks of one it is only the shards that change places
        assert len(set(map(tuple, orders))) == 3


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_goes_on_from_any_position_as_if_it_had_never_stopped(folder: Path, shuffle: bool) -> None:
    source = opened(folder)
    whole = stream(source, 3 * TOTAL + 5, shuffle=shuffle)  # after which a stream's sizes are known, as from a checkpoint
    for position in range(3 * TOTAL):
        assert stream(source, 5, position, shuffle=shuffle) == whole[position : position + 5], position


def test_a_stream_goes_on_within_its_first_epoch_though_no_size_is_known(folders: dict[str, Path]) -> None:
    whole = stream(opened(folders["jsonl"]), 2 * TOTAL)
    for position in range(TOTAL):
        source = opened(folders["jsonl"])
        assert isinstance(source, StreamSource)
        source.sizes[:] = [None] * len(SHARDS)
        assert stream(source, TOTAL, position) == whole[position : position + TOTAL], position


@pytest.mark.parametrize("batch", [8, 48])  # 48: a batch that is larger than the set
def test_the_global_batches_are_the_same_on_any_number_of_processes(folder: Path, batch: int) -> None:
    steps = 4
    source = opened(folder)
    expected = stream(source, steps * batch)
    for lanes, processes in [(1, 1), (4, 2), (4, 4), (8, 2)]:
        found: list[list[Sample]] = [[] for _ in range(steps)]
        for share in shares(batch, lanes, processes):
            micros = plan(source, share)
            for step in range(steps):
                for records in itertools.islice(micros, lanes // processes):
                    assert len(records.keys) == batch // lanes
                    found[step] += samples(records)
        assert list(itertools.chain.from_iterable(found)) == expected, (lanes, processes)


def test_rows_are_those_of_their_keys(folder: Path) -> None:
    source = opened(folder)
    for records in itertools.islice(plan(source, Share(8, 4, range(2))), 12):
        rows = rows_of(source, records)
        names = [row["label"] for row in rows.to_pylist()]
        if isinstance(source, StreamSource):
            places = [source.where(int(key)) for key in records.keys]
            firsts = dict(zip(sorted(source.files), (0, 10, 13), strict=True))
            numbers = [firsts[place.split(" row ")[0]] + int(place.split(" row ")[1]) for place in places]
            assert names == [str(made.label_of(number)) for number in numbers]
        else:
            numbers = [int(Path(source.where(int(key))).stem) for key in records.keys]
            assert names == [f"class{made.label_of(number)}" for number in numbers]


def test_an_epochs_length_is_known_to_whoever_has_its_last_sample(folders: dict[str, Path]) -> None:
    source = opened(folders["jsonl"])
    assert isinstance(source, StreamSource)
    source.sizes[:] = [None] * len(SHARDS)
    found = plan(source, Share(1, 1, range(1)))
    for _ in range(TOTAL):
        next(found)
    assert epoch_length(source) == TOTAL
    assert source.sizes == list(SHARDS)


def test_a_stream_far_on_passes_over_what_lies_before_unread(folders: dict[str, Path], tmp_path: Path) -> None:
    """At a position in the last shard of an epoch, the shards before it are not opened: here they are no longer there."""
    folder = made.shards(tmp_path / "set", SHARDS)
    source = opened(folder)
    assert isinstance(source, StreamSource)
    epoch = next(epoch for epoch in itertools.count(1000) if shard_order(epoch, 3, 0, shuffle=True)[-1] == 0)
    start = epoch * TOTAL + 12  # the first shard is read last, from place 10 on; a block of 3 starts at 12
    expected = stream(source, 3, start, block=3)
    assert {key >> SHARD_BITS for _, key in expected} == {0}
    for file in source.reader.files[1:]:
        Path(file).unlink()
    assert stream(source, 3, start, block=3) == expected


def test_a_map_style_plan_is_the_pure_order(folders: dict[str, Path]) -> None:
    source = opened(folders["folders"])
    for position in (0, 7, 10**7, 10**12):
        epochs, keys = map_order(np.arange(position, position + 50), TOTAL, 0, shuffle=True)
        assert stream(source, 50, position) == list(zip(epochs.tolist(), keys.tolist(), strict=True))


@pytest.mark.parametrize("processes", [1, 2, 3, 30])
@pytest.mark.parametrize("micro", [1, 3, 40])
def test_evaluation_has_each_sample_once_on_any_number_of_processes(folder: Path, processes: int, micro: int) -> None:
    source = opened(folder)
    parts = [list(map(samples, evaluation_plan(source, micro, rank, processes))) for rank in range(processes)]
    assert sorted(sample for part in parts for batch in part for sample in batch) == [(0, key) for key in keys_of(source)]
    # The batches themselves are the same too, so that each one's sums are the same bits.
    alone = list(map(samples, evaluation_plan(source, micro, 0, 1)))
    assert sorted(batch for part in parts for batch in part) == sorted(alone)


def test_the_first_records_are_those_of_the_files(folder: Path) -> None:
    found = [samples(records) for records in first_records(opened(folder), 12)]
    assert found == [[(0, key)] for key in keys_of(opened(folder))[:12]]
    assert len(list(first_records(opened(folder), 100))) == TOTAL


def test_an_error_of_a_reading_thread_is_raised_where_its_item_would_have_come() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    ahead = readahead(broken, depth=1)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert list(readahead(lambda: iter(range(100)), depth=3)) == list(range(100))
