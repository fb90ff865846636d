import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import ids, json_lines, opened, parquet, png, rows_of

from train.errors import RunError, UsageError


def test_columns_are_found_by_their_usual_names(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"id": 7, "img": f"{i}.png", "fine_label": i} for i in range(2)])
    sources = opened(path)
    assert "image column: img; label column: fine_label" in sources.notes
    assert ids(sources) == [0, 1]


def test_types_that_say_what_a_column_is_for_go_before_names(tmp_path):
    import datasets

    organ = datasets.ClassLabel(names=["eye", "ear"])
    kinds = {"image": datasets.Value("string"), "scan": datasets.Image(), "label": datasets.Value("int64"), "organ": organ}
    rows = {"image": ["x"] * 2, "scan": [{"bytes": png(), "path": None}] * 2, "label": [5, 6], "organ": [1, 0]}
    datasets.Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(tmp_path / "a.parquet")
    sources = opened(tmp_path / "a.parquet")
    assert "image column: scan; label column: organ" in sources.notes
    assert sources.classes == ("eye", "ear")
    assert opened(tmp_path / "a.parquet", label_column="label").classes == tuple(map(str, range(7)))


def test_extra_columns_of_any_type_are_not_read(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1], id=[1, 2], text=["x", "yy"], tags=[["a"], []], ragged=[[1.0], [1.0, 2.0]])
    for streaming in (True, False):
        assert set(rows_of(opened(path, streaming=streaming).train)[0][1]) == {"image", "label"}


@pytest.mark.parametrize(("key", "column"), [("image_column", "imgs"), ("label_column", "labell")])
def test_a_column_that_does_not_exist_is_told_with_those_that_do(tmp_path, key, column):
    with pytest.raises(UsageError, match=rf"data.{key}: there is no column {column}; the columns are image .*, label \(int64\)"):
        opened(parquet(tmp_path / "a.parquet", [0, 1]), **{key: column})


def test_without_a_usual_name_the_key_to_set_is_told(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"foo": "a.png", "bar": 1}])
    with pytest.raises(UsageError, match=r"data.image_column must say.*the columns are foo \(str\), bar \(int\)"):
        opened(path)
    with pytest.raises(UsageError, match=r"data.label_column must say"):
        opened(path, image_column="foo")


def test_two_image_columns_are_not_guessed_between(tmp_path):
    import datasets

    image = [{"bytes": png(), "path": None}]
    features = datasets.Features({"front": datasets.Image(), "back": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"front": image, "back": image, "label": [1]}, features).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"data.image_column must say which column is meant: front or back"):
        opened(tmp_path / "a.parquet")


def test_a_column_of_lists_is_no_label(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1], tags=[["a"], []])
    with pytest.raises(UsageError, match=r"data.label_column: column tags of .*a.parquet is list"):
        opened(path, label_column="tags")


@pytest.mark.parametrize("streaming", [True, False])
def test_an_extra_column_in_one_file_changes_nothing(tmp_path, streaming):
    json_lines(tmp_path / "set/m0.jsonl", [{"image": "a", "label": 0}] * 3)
    json_lines(tmp_path / "set/m1.jsonl", [{"image": "a", "label": 1, "extra": [1]}] * 2)
    assert ids(opened(tmp_path / "set", streaming=streaming)) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_file_without_the_label_column_is_named_before_training(tmp_path, suffix):
    if suffix == "jsonl":
        json_lines(tmp_path / "m0.jsonl", [{"image": "a", "label": 0}])
        json_lines(tmp_path / "m2.jsonl", [{"image": "a"}])
    elif suffix == "csv":
        (tmp_path / "m0.csv").write_text("image,label\na,0\n")
        (tmp_path / "m2.csv").write_text("image\na\n")
    else:
        path = parquet(tmp_path / "m0.parquet", [0])
        pq.write_table(pq.read_table(path).drop_columns(["label"]), tmp_path / "m2.parquet")
    with pytest.raises(RunError, match=f"m2.{suffix}: has no column label, which .*m0.{suffix} has"):
        opened(tmp_path)


@pytest.mark.parametrize("streaming", [True, False])
def test_whole_numbers_of_different_widths_are_one_label(tmp_path, streaming):
    parquet(tmp_path / "set/a.parquet", pa.array([0, 1], pa.int32()))
    parquet(tmp_path / "set/b.parquet", pa.array([2, 1], pa.int64()))
    assert ids(opened(tmp_path / "set", streaming=streaming)) == [0, 1, 2, 1]


def test_numbers_in_one_file_and_text_in_another_are_refused_with_both_names(tmp_path):
    parquet(tmp_path / "a.parquet", [0, 1])
    parquet(tmp_path / "b.parquet", ["0", "1"])
    with pytest.raises(RunError, match=r"b.parquet: column label is string, but int64 in .*a.parquet"):
        opened(tmp_path)


def test_pictures_may_be_bytes_or_paths_seen_from_their_table(tmp_path):
    for column, expected in (
        (pa.array([b"x", b"y"]), {"bytes": b"x", "path": None}),
        (pa.array(["x.png", "/y.png"]), {"bytes": None, "path": f"{tmp_path}/x.png"}),
    ):
        pq.write_table(pa.table({"image": column, "label": [0, 1]}), tmp_path / "a.parquet")
        assert rows_of(opened(tmp_path / "a.parquet").train)[0][1]["image"] == expected
    assert rows_of(opened(tmp_path / "a.parquet").train)[1][1]["image"]["path"] == "/y.png"
