import gzip
import io
import json
import tarfile

import pyarrow as pa
import pytest
from made import ids, json_lines, opened, parquet, rows_of

from train.errors import RunError, UsageError

ROWS = [{"image": "a.png", "label": name} for name in ("cat", "dog", "cat")]


def test_a_missing_path_is_told_with_what_exists_above_it(tmp_path):
    with pytest.raises(RunError) as refused:
        opened(tmp_path / "dta" / "train")
    assert str(refused.value) == f"data.path: no such file or folder: {tmp_path}/dta/train ({tmp_path} exists and has no dta)"


def test_a_glob_without_a_match_tells_the_pattern_and_where_it_was_searched(tmp_path):
    with pytest.raises(
        RunError, match=rf"no file matches {tmp_path}/nope/\*.parquet \(searched from {tmp_path}/nope, which does not"
    ):
        opened(tmp_path / "nope" / "*.parquet")
    with pytest.raises(RunError, match=rf"no file matches .* \(searched from {tmp_path}, which exists"):
        opened(tmp_path / "*.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_an_empty_file_alone_is_refused_by_name(tmp_path, name):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / name).touch()
    for path in (tmp_path / "set" / name, tmp_path / "set"):
        with pytest.raises(RunError, match=rf"{name}: the file is empty \(0 bytes\)"):
            opened(path)


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_an_empty_file_among_good_ones_is_left_out_and_told(tmp_path, pattern):
    json_lines(tmp_path / "set/a.jsonl", ROWS)
    (tmp_path / "set/b.jsonl").touch()
    sources = opened(tmp_path / "set" / pattern)
    assert len(ids(sources)) == 3
    assert f"left out: {tmp_path}/set/b.jsonl is empty (0 bytes)" in sources.notes


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(RunError, match=f"the folder {tmp_path}/set is empty"):
        opened(tmp_path / "set")


def test_a_folder_without_data_files_tells_what_it_holds(tmp_path):
    (tmp_path / "a.docx").write_text("-")
    with pytest.raises(RunError, match=r"holds no data file \(.docx\); wanted are pictures in class folders or .parquet, .csv"):
        opened(tmp_path)


def test_files_of_two_formats_are_refused(tmp_path):
    json_lines(tmp_path / "a.jsonl", ROWS)
    parquet(tmp_path / "b.parquet", ["cat"])
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(RunError, match=r"all of one format.*has .jsonl, .parquet"):
            opened(path)


@pytest.mark.parametrize(("name", "text"), [("a.csv", "image,label\n"), ("a.jsonl", "\n\n"), ("a.json", "[]")])
def test_a_file_without_rows_is_told(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=rf"split train has no rows \({name}\)"):
        opened(tmp_path / name)


def test_a_validation_split_without_rows_is_told(tmp_path):
    parquet(tmp_path / "train.parquet", [0, 1])
    parquet(tmp_path / "test.parquet", [])
    with pytest.raises(RunError, match=r"split test has no rows \(test.parquet\)"):
        opened(tmp_path)


def test_a_text_beside_tables_is_a_note_and_not_data(tmp_path):
    parquet(tmp_path / "a.parquet", [0, 1])
    (tmp_path / "LICENSE.txt").write_text("free")
    assert opened(tmp_path).train.files == ("a.parquet",)


def test_what_datasets_saved_to_disk_opens(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "set")
    assert ids(opened(tmp_path / "set")) == [0, 1, 0]


def test_splits_come_from_the_names_of_files(tmp_path):
    parquet(tmp_path / "train-0.parquet", [0, 1, 1])
    parquet(tmp_path / "train-1.parquet", [0])
    parquet(tmp_path / "test-0.parquet", [1, 0])
    sources = opened(tmp_path)
    assert sources.train.sizes == [3, 1]
    assert sources.validation.sizes == [2]
    assert opened(tmp_path, validation_split="none").validation is None
    swapped = opened(tmp_path, train_split="test", validation_split="train")
    assert (swapped.train.sizes, swapped.validation.sizes) == ([2], [3, 1])


@pytest.mark.parametrize("key", ["train_split", "validation_split"])
def test_a_split_that_does_not_exist_is_told_with_those_that_do(tmp_path, key):
    parquet(tmp_path / "train.parquet", [0, 1])
    parquet(tmp_path / "test.parquet", [0, 1])
    with pytest.raises(UsageError, match=f"data.{key}: there is no split trian.*the splits train, test"):
        opened(tmp_path, **{key: "trian"})


def test_subsets_come_from_the_readme_of_a_data_set(tmp_path):
    parquet(tmp_path / "big/a.parquet", [0, 1, 2])
    parquet(tmp_path / "small/a.parquet", [0, 1])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/a.parquet\n" for name in ("big", "small"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    assert opened(tmp_path, subset="small").train.sizes == [2]
    for subset in (None, "tiny"):
        with pytest.raises(UsageError, match=r"data.subset: .*'big', 'small'"):
            opened(tmp_path, subset=subset)


def test_the_validation_set_may_be_another_one(tmp_path):
    parquet(tmp_path / "here/a.parquet", ["cat", "dog"])
    json_lines(tmp_path / "there/b.jsonl", ROWS)
    sources = opened(tmp_path / "here", validation_path=str(tmp_path / "there/b.jsonl"))
    assert [sources.labels.id(row["label"]) for _, row in rows_of(sources.validation)] == [0, 1, 0]
    with pytest.raises(RunError, match=r"data.validation_path: no such file or folder"):
        opened(tmp_path / "here", validation_path=str(tmp_path / "nowhere"))


def test_paths_with_blanks_and_links_work_and_samples_are_named_below_them(tmp_path):
    parquet(tmp_path / "my set" / "a.parquet", [0, 1])
    (tmp_path / "link").symlink_to(tmp_path / "my set")
    for path in ("my set", "my set/a.parquet", "link", "link/a.parquet", "link/*.parquet"):
        sources = opened(tmp_path / path)
        assert ids(sources) == [0, 1]
        assert sources.train.files == ("a.parquet",)


@pytest.mark.parametrize("name", ["set [1]", "what? *"])
def test_a_folder_whose_name_looks_like_a_pattern_is_taken_as_it_is(tmp_path, name):
    train = parquet(tmp_path / name / "train.parquet", [0, 1])
    parquet(tmp_path / name / "test.parquet", [1])
    sources = opened(train.parent)
    assert (ids(sources), sources.validation.sizes) == ([0, 1], [1])
    assert ids(opened(train)) == [0, 1]
    (train.parent / "README.md").write_text("---\nconfigs: []\n---\n")
    with pytest.raises(RunError, match=r"in the name of a folder with a README.md for a pattern: rename"):
        opened(train.parent)


@pytest.mark.parametrize("pattern", ["", "a.parquet", "*.parquet"])
@pytest.mark.parametrize("key", ["revision", "subset"])
def test_a_revision_or_a_subset_of_what_has_none_is_refused(tmp_path, pattern, key):
    parquet(tmp_path / "a.parquet", [0, 1])
    with pytest.raises(
        UsageError, match=rf"data.{key}: v2 means nothing, as data.path={tmp_path}.* is not on the Hugging Face Hub"
    ):
        opened(tmp_path / pattern, **{key: "v2"})


def write_gzip(path):
    with gzip.open(path, "wt") as file:
        file.write("image,label\n" + "".join("{image},{label}\n".format(**row) for row in ROWS))


def write_tar(path):
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(ROWS):
            for suffix, data in (("png", b"-"), ("txt", row["label"].encode())):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def write_arrow(path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write(table)


@pytest.mark.parametrize(
    ("name", "write", "keys"),
    [
        ("a.csv", lambda path: path.write_text("\ufeffimage,label\nx,cat\n\nx,dog\nx,cat\n"), {}),
        ("a.tsv", lambda path: path.write_text("image\tlabel\nx\tcat\nx\tdog\nx\tcat\n"), {}),
        ("a.csv.gz", write_gzip, {}),
        ("a.csv", lambda path: path.write_text("label,image\ncat\ndog,x,y,z\ncat,x\n"), {}),  # rows cut short and too long
        ("a.jsonl", lambda path: json_lines(path, ROWS), {}),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS, indent=1)), {}),
        ("a.parquet", lambda path: parquet(path, ["cat", "dog", "cat"]), {}),
        ("a.arrow", write_arrow, {}),
        ("a.tar", write_tar, {"label_column": "txt"}),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_every_format_opens_as_a_stream_and_prepared(tmp_path, name, write, keys, streaming):
    write(tmp_path / name)
    sources = opened(tmp_path / name, streaming=streaming, **keys)
    assert ids(sources) == [0, 1, 0]
    assert sources.train.where(rows_of(sources.train)[2][0]) == f"{name} row 2"
