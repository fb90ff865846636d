import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import ids, json_lines, opened, parquet

from train.data.labels import Labels, infer
from train.errors import RunError, UsageError


def label_csv(folder, label):
    """Twenty good rows of the classes 0, 1, 2 and after them one with `label`."""
    path = folder / "set.csv"
    path.write_text("image,label\n" + "".join(f"{i}.png,{i % 3}\n" for i in range(20)) + f"20.png,{label}\n")
    return path


@pytest.mark.parametrize(("label", "number"), [("1", 1), ("2.0", 2), (" 1", 1), ("2 ", 2)])
def test_a_number_is_the_same_class_however_it_is_written(tmp_path, label, number):
    assert ids(opened(label_csv(tmp_path, label), classes=3))[20] == number


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("", "the label is missing"),
        ("  ", "the label is missing"),
        ("NA", "label 'NA' is not a whole number in 0..2 (3 classes)"),
        ("None", "label 'None' is not a whole number in 0..2 (3 classes)"),
        ("nan", "label 'nan' is not a whole number in 0..2 (3 classes)"),
        ("cat", "label 'cat' is not a whole number in 0..2 (3 classes)"),
        ("1.5", "label '1.5' is not a whole number in 0..2 (3 classes)"),
        ("inf", "label 'inf' is not a whole number in 0..2 (3 classes)"),
        ("-1", "label -1 is outside 0..2 (3 classes)"),
        ("5", "label 5 is outside 0..2 (3 classes)"),
    ],
)
def test_a_label_that_is_no_class_is_refused_with_its_row_and_what_is_allowed(tmp_path, label, complaint):
    found = ids(opened(label_csv(tmp_path, label), classes=3))
    assert found[:20] == [i % 3 for i in range(20)]
    assert found[20] == f"set.csv row 20: {complaint}"


@pytest.mark.parametrize("label", ["", "NA", "None", "-1", "1.5"])
def test_a_bad_label_makes_no_class_of_its_own(tmp_path, label):
    assert opened(label_csv(tmp_path, label)).classes == ("0", "1", "2")


def test_numbers_and_text_in_one_column_are_refused_with_a_row_of_each(tmp_path):
    with pytest.raises(UsageError, match=r"'0' in set.csv row 0.*'cat' in set.csv row 20.*data.classes"):
        opened(label_csv(tmp_path, "cat"))


def test_text_labels_are_the_classes_in_the_order_of_the_alphabet(tmp_path):
    sources = opened(parquet(tmp_path / "a.parquet", ["dog", "cat", "cow", None, "", " cat"]))
    assert sources.classes == ("cat", "cow", "dog")
    missing = [f"a.parquet row {row}: the label is missing" for row in (3, 4)]
    assert ids(sources) == [2, 0, 1, *missing, 0]


def test_bool_labels_are_classes_0_and_1(tmp_path):
    assert ids(opened(parquet(tmp_path / "a.parquet", [False, True, True]))) == [0, 1, 1]
    rows = [{"image": "a.png", "label": label} for label in (False, True)]
    assert ids(opened(json_lines(tmp_path / "a.jsonl", rows))) == [0, 1]


def test_a_null_or_absent_label_in_json_lines_is_missing_and_not_a_class(tmp_path):
    rows = [{"image": "a", "label": 0}, {"image": "a", "label": 1}, {"image": "a", "label": None}, {"image": "a"}]
    assert ids(opened(json_lines(tmp_path / "a.jsonl", rows))) == [
        0, 1, "a.jsonl row 2: the label is missing", "a.jsonl row 3: the label is missing",
    ]  # fmt: skip


def test_nan_among_float_labels_is_refused(tmp_path):
    found = ids(opened(parquet(tmp_path / "a.parquet", [1.0, 0.0, float("nan")])))
    assert found == [1, 0, "a.parquet row 2: label 'nan' is not a whole number in 0..1 (2 classes)"]


def test_class_names_of_the_data_set_say_what_its_numbers_mean(tmp_path):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["8", "7"])})
    image = {"bytes": b"-", "path": None}
    rows = {"image": [image] * 4, "label": [0, 1, -1, 7]}
    table = datasets.Dataset.from_dict({"image": [image] * 2, "label": [0, 1]}, features).with_format("arrow")[:]
    schema = table.schema
    pq.write_table(
        pa.table([pa.array(rows["image"], schema.field(0).type), pa.array(rows["label"])], schema=schema), tmp_path / "a.parquet"
    )
    sources = opened(tmp_path / "a.parquet")
    assert sources.classes == ("8", "7")
    found = ids(sources)
    assert found[:2] == [0, 1]
    assert "row 2: label '-1' is not one of the 2 classes (8, 7)" in found[2]
    assert "row 3: the label is missing" in found[3]  # class number 7 does not exist, and is not the class called 7


def test_configured_classes_fix_the_order_and_allow_the_words_for_no_label(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["scratch", "None", "dent"])
    assert opened(path).classes == ("dent", "scratch")
    assert ids(opened(path, classes=("None", "scratch", "dent"))) == [1, 0, 2]


def test_configured_names_are_given_to_numbers(tmp_path):
    sources = opened(parquet(tmp_path / "a.parquet", [1, 0, 2]), classes=("cat", "dog"))
    assert ids(sources) == [1, 0, "a.parquet row 2: label 2 is outside 0..1 (2 classes)"]


def test_a_misspelt_class_is_told_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"label 'catt' is not one of the 2 classes.*did you mean 'cat'"):
        Labels(("cat", "dog")).id("catt")


def test_identifiers_are_not_taken_for_classes():
    with pytest.raises(UsageError, match=r"label 900000000 in a row 3.*data.classes"):
        infer({"1": "a row 0", "900000000": "a row 3"})


def test_a_column_without_any_label_is_refused():
    with pytest.raises(RunError, match=r"no label in any row"):
        infer({"": "a row 0", "NA": "a row 1", "-1": "a row 2"})


def test_labels_travel_to_workers():
    labels = Labels(("cat", "dog"))
    assert pickle.loads(pickle.dumps(labels)).id("dog") == 1
