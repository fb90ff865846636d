from pathlib import Path

import numpy as np
import pytest
from made import ids, opened, picture, png, rows_of

from train.errors import RunError

WANTED = "wanted: train/CLASS/picture.jpg"


def class_folders(root, split, classes, count=2):
    for name in classes:
        for number in range(count):
            picture(root / split / name / f"{number}.png", number)


def test_class_folders_give_samples_named_by_their_own_files(tmp_path):
    class_folders(tmp_path / "set", "train", ("dog", "cat"))
    class_folders(tmp_path / "set", "val", ("dog", "cat"), count=1)
    sources = opened(tmp_path / "set")
    assert sources.classes == ("cat", "dog")
    assert ids(sources) == [0, 0, 1, 1]
    assert sources.train.where(3) == "train/dog/1.png"
    assert sources.train.files == ("train/cat/0.png", "train/cat/1.png", "train/dog/0.png", "train/dog/1.png")
    assert [row["label"] for _, row in rows_of(sources.validation)] == ["cat", "dog"]
    taken = sources.train.take(np.array([3, 0])).to_pylist()
    assert [row["label"] for row in taken] == ["dog", "cat"]
    assert taken[0]["image"] == {"bytes": None, "path": str(tmp_path / "set/train/dog/1.png")}


def test_class_folders_are_taken_in_any_order_also_when_streaming_is_asked_for(tmp_path):
    class_folders(tmp_path, ".", ("dog", "cat"))
    streamed, prepared = opened(tmp_path, streaming=True), opened(tmp_path, streaming=False)
    assert type(streamed.train) is type(prepared.train)
    assert streamed.train.take(np.arange(4)) == prepared.train.take(np.arange(4))
    assert any("taken in any order" in note for note in streamed.notes)


def test_deeper_folders_belong_to_the_class_folder_above_them(tmp_path):
    for name in ("cat/young/a.JPG", "cat/old/b.jpeg", "dog/c.png"):
        picture(tmp_path / "train" / name)
    assert ids(opened(tmp_path)) == [0, 0, 1]


def test_a_class_may_be_called_like_a_split(tmp_path):
    class_folders(tmp_path, ".", ("test", "cat"))
    assert opened(tmp_path).classes == ("cat", "test")


def test_split_folders_never_become_classes(tmp_path):
    for split in ("train", "test"):
        picture(tmp_path / split / "0.png")
    with pytest.raises(RunError, match=f"no class folders found.*test/ and train/; {WANTED}"):
        opened(tmp_path)


def test_pictures_in_the_folder_itself_are_refused_with_the_wanted_layout(tmp_path):
    picture(tmp_path / "0.png")
    (tmp_path / "notes.txt").write_text("taken in May")
    with pytest.raises(RunError, match=f"no class folders found.*the folder itself; {WANTED}"):
        opened(tmp_path)


def test_a_picture_beside_the_class_folders_is_refused_by_name(tmp_path):
    class_folders(tmp_path, "train", ("cat", "dog"))
    picture(tmp_path / "train" / "lost.png")
    with pytest.raises(RunError, match=r"1 of the pictures lie outside class folders, such as train/lost.png"):
        opened(tmp_path)


def test_a_single_class_is_refused(tmp_path):
    class_folders(tmp_path, "train", ("cat",))
    with pytest.raises(RunError, match=r"only one class \(cat\), so there is nothing to learn"):
        opened(tmp_path)


def test_a_class_that_only_validation_has_is_refused_by_name(tmp_path):
    class_folders(tmp_path, "train", ("cat", "dog"))
    class_folders(tmp_path, "val", ("cat", "cow"))
    with pytest.raises(RunError, match=r"split validation has a class that is not trained.*'cow'"):
        opened(tmp_path)


def test_validation_may_lack_classes_without_shifting_the_numbers_of_others(tmp_path):
    class_folders(tmp_path, "train", ("ant", "bee", "cat"))
    class_folders(tmp_path, "val", ("cat",))
    sources = opened(tmp_path)
    assert [sources.labels.id(row["label"]) for _, row in rows_of(sources.validation)] == [2, 2]


def test_hidden_files_are_no_pictures(tmp_path):
    class_folders(tmp_path, "train", ("cat", "dog"), count=1)
    picture(tmp_path / "train/cat/._0.png")
    picture(tmp_path / ".thumbnails/x/0.png")
    assert opened(tmp_path).train.files == ("train/cat/0.png", "train/dog/0.png")


def test_pictures_that_a_table_names_are_found_from_the_table(tmp_path):
    for number in range(3):
        picture(tmp_path / f"train/{number}.png", number)
    (tmp_path / "train/metadata.csv").write_text("file_name,label\n2.png,b\n0.png,a\n")
    sources = opened(tmp_path)
    assert ids(sources) == [1, 0]
    path = rows_of(sources.train)[0][1]["image"]["path"]
    assert Path(path).read_bytes() == png(2)
