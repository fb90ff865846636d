import io
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from made import ids, json_lines, opened, parquet, png, rows_of
from PIL import Image

from train.config.schema import Data
from train.data import readers
from train.data.pictures import _classes
from train.data.source import StreamSource
from train.errors import RunError, UsageError

REAL = Path(__file__).parents[2].parent / "shared/data"
real_data = pytest.mark.skipif(not REAL.exists(), reason="the sample data sets are not on this machine")


def labels_from(source, shard, start):
    return [label for table in source.tables(shard, start) for label in table["label"].to_pylist()]


@pytest.mark.parametrize("start", [0, 1, 4, 5, 7, 11, 12])
def test_a_parquet_shard_is_read_from_any_row_on(tmp_path, start):
    labels = [str(row) for row in range(12)]
    source = opened(parquet(tmp_path / "a.parquet", labels, row_group_size=4), classes=12).train
    assert source.sizes == [12]
    assert labels_from(source, 0, start) == labels[start:]


def test_a_start_in_the_middle_of_a_parquet_shard_does_not_read_what_lies_before(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1] * 6, row_group_size=4)
    data = bytearray(path.read_bytes())
    first_image = data.index(png(0))
    data[first_image - 40 : first_image + 200] = bytes(240)
    path.write_bytes(data)
    source = opened(path, classes=2).train
    assert labels_from(source, 0, 4) == ["0", "1"] * 4
    with pytest.raises(RunError, match=r"a.parquet: cannot be read \(damaged"):
        labels_from(source, 0, 0)


@pytest.mark.parametrize("start", [0, 1, 999, 1000, 2499, 2500])
def test_a_json_lines_shard_is_read_from_any_row_on(tmp_path, start):
    labels = [str(row) for row in range(2500)]
    path = json_lines(tmp_path / "a.jsonl", ({"image": "a", "label": label} for label in labels))
    assert labels_from(opened(path, classes=2500).train, 0, start) == labels[start:]


@pytest.mark.parametrize("size", [0.1, 0.5, 0.99])
def test_a_truncated_parquet_file_is_refused_by_name(tmp_path, size):
    path = parquet(tmp_path / "set/a.parquet", [0, 1] * 50)
    parquet(tmp_path / "set/b.parquet", [0, 1])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * size)])
    with pytest.raises(RunError, match=r"set/a.parquet: cannot be read"):
        opened(tmp_path / "set")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_line_that_is_not_json_is_told_with_its_number(tmp_path, streaming):
    path = json_lines(tmp_path / "a.jsonl", [{"image": "a", "label": row % 2} for row in range(200)])
    path.write_text(path.read_text() + '{"image": "a", "lab\n')
    with pytest.raises(RunError, match=r"a.jsonl:201: not JSON"):
        rows_of(opened(path, streaming=streaming, classes=2).train)


def test_json_rows_may_differ_in_their_keys_and_types_from_those_before(tmp_path):
    rows = [{"image": "a", "label": 1}] * 200
    odd = [{"label": "cat", "image": "a"}, {"image": "a", "label": 2.0, "box": {"x": [1]}}, {"image": "a"}]
    source = opened(json_lines(tmp_path / "a.jsonl", rows + odd), classes=3).train
    assert labels_from(source, 0, 200) == ["cat", "2.0", None]


def test_sizes_that_are_not_known_are_counted_when_asked(tmp_path):
    for name, count in (("a", 3), ("b", 1001)):
        json_lines(tmp_path / f"set/{name}.jsonl", [{"image": "x", "label": 0}] * count)
    source = opened(tmp_path / "set", classes=2).train
    assert source.sizes == [None, None]
    source.count()
    assert source.sizes == [3, 1001]


def test_a_prepared_set_gives_the_rows_of_the_stream_in_the_order_of_the_keys(tmp_path):
    for number in range(3):
        parquet(tmp_path / f"set/{number}.parquet", [str(10 * number + row) for row in range(5)])
    stream, prepared = opened(tmp_path / "set", classes=25).train, opened(tmp_path / "set", classes=25, streaming=False).train
    rows = [row for _, row in rows_of(stream)]
    assert prepared.size == 15
    assert [row for _, row in rows_of(prepared)] == rows
    keys = np.array([14, 0, 7, 7])
    assert prepared.take(keys).to_pylist() == [rows[key] for key in keys]
    assert prepared.where(14) == "2.parquet row 4" == stream.where(stream.key(2, 4))


def test_preparing_is_done_once_and_again_when_a_file_changes(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1])
    said: list[str] = []

    def rows():
        said.clear()
        return ids(opened(path, said.append, streaming=False))

    assert (rows(), len(said)) == ([0, 1], 1)
    assert (rows(), len(said)) == ([0, 1], 0)
    parquet(path, [1, 0])
    os.utime(path, ns=(0, 0))
    assert (rows(), len(said)) == ([1, 0], 1)


def prepared_ids(path):
    return ids(opened(path, streaming=False))


def test_several_processes_may_prepare_the_same_set_at_once(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1, 1] * 500)
    with get_context("fork").Pool(4) as pool:
        assert pool.map(prepared_ids, [path] * 4) == [[0, 1, 1] * 500] * 4


def test_records_can_be_taken_in_forked_workers(tmp_path):
    from torch.utils.data import DataLoader

    source = opened(parquet(tmp_path / "a.parquet", [0, 1] * 50), streaming=False).train
    batches = DataLoader(
        range(100), batch_size=10, num_workers=2, multiprocessing_context="fork",
        collate_fn=lambda keys: source.take(np.array(keys))["label"].to_pylist(),
    )  # fmt: skip
    assert [label for batch in batches for label in batch] == ["0", "1"] * 50


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1])
    (tmp_path / "file").write_text("in the way")
    code = (
        "import sys; from made import opened; from train.errors import LockstepError\n"
        "print(opened(sys.argv[1]).train.sizes)\n"
        "try: opened(sys.argv[1], streaming=False)\n"
        "except LockstepError as error: print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, path],
        env={**os.environ, "HF_HOME": f"{tmp_path}/file/x", "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert out.startswith("[2]\n")  # a stream of local files needs no cache
    assert f"the cache of datasets cannot be written ([Errno 20] Not a directory: '{tmp_path}/file/x'); set HF_HOME" in out


def test_a_remote_stream_without_class_names_asks_for_them_instead_of_reading_it_all(tmp_path):
    reader = readers.json_lines([str(json_lines(tmp_path / "a.jsonl", [{"image": "a", "label": 0}]))], {})
    reader = readers.Reader(("hf://datasets/org/set/a.jsonl",), reader.sizes, reader.columns, reader.batches, {})
    stream = StreamSource("", reader, "image", "label")
    with pytest.raises(UsageError, match=r"data.classes must say"):
        _classes(stream, stream, Data(path="org/set"), print)


@real_data
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("name", "train", "test", "shape"), [("mnist", 60000, 10000, (28, 28)), ("cifar10", 50000, 10000, (32, 32))]
)
def test_the_real_sets_open_whole(name, train, test, shape, streaming):
    sources = opened(REAL / name, streaming=streaming)
    rows = rows_of(sources.train)
    assert len(rows) == len({key for key, _ in rows}) == train
    assert len(rows_of(sources.validation)) == test
    counts = np.bincount([sources.labels.id(row["label"]) for _, row in rows])
    if name == "mnist":  # as published for the training set
        assert counts.tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    else:
        assert counts.tolist() == [5000] * 10
        assert sources.classes == ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    assert Image.open(io.BytesIO(rows[-1][1]["image"]["bytes"])).size == shape
