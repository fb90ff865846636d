"""What a person can get wrong ends in one clear message, the right exit code, and nothing that a resume would pick up."""

from __future__ import annotations

import io
import json
import math
import shlex
import struct
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import left, made
from tests.conftest import Finished, Runner
from tests.spied import Spied, spied

LINEAR = "model.name=tests.spies_failure:Linear"
USAGE, FAILED = 2, 1


def refused(train: Runner, finished: Finished, code: int) -> str:
    """The one message of a run that could not start, or not go on."""
    assert finished.code == code, finished.output
    assert "Traceback" not in finished.output
    assert finished.output.count("error: ") == 1, finished.output
    assert not list(train.outputs.glob("*/checkpoints/*step-*")) and not list(train.outputs.glob("*/summary.json"))
    return finished.output.partition("error: ")[2]


# --- settings ---


WRONG = [
    ("optimizer.lrr=1", ["command line: optimizer.lrr", "did you mean optimizer.lr"]),
    ("optimzer.lr=1", ["command line: optimzer", "did you mean optimizer?"]),
    ("batch.size=8 batch.lanes=3", ["3 lanes do not divide batch.size 8", "2 and 4"]),
    ("steps=3 epochs=3", ["give one of steps and epochs"]),
    ("optimizer.lr=fast", ["optimizer.lr", "fast"]),
    ("optimizer.name=Adamw", ["optimizer.name", "AdamW"]),
    ("optimizer.momentun=0.5", ["optimizer.momentun", "momentum"]),
    ("schedule.name=cosin", ["schedule.name", "cosine"]),
    ("model.name=digit_cnn", ["model.name", "digits_cnn"]),
    ("model.name=tests.spies_failure:Nothing", ["model.name", "cannot be imported"]),
    ("model.name=math:pi", ["model.name", "math:pi is 3.14", "cannot be called"]),
    ("model.name=:Net", ["model.name", ":Net cannot be imported"]),
    ("data.classes=1", ["data.classes", "two classes or more"]),
    ("data.classes=[cat,dog,cat]", ["data.classes", "names cat twice"]),
    ("model.name=torchvision/resnet19", ["model.name", "torchvision/resnet1"]),
    ("model.colour=3", ["model.colour"]),
    ("model.side=16", ["model.name: tests.spies:Spy cannot take samples of size (3, 8, 8)"]),
    ("'data.transforms.train=[{RandomCrp: {size: 8}}]'", ["data.transforms.train.0.RandomCrp", "RandomCrop"]),
    ("data.label_column=lable", ["data.label_column: there is no column lable", "label (int64)"]),
    ("data.train_split=trane", ["data.train_split: there is no split trane", "has the splits train"]),
    ("nowhere.yaml", ["nowhere.yaml"]),
    ("broken.yaml", ["broken.yaml:3: is not YAML"]),
    ("run.allow_changes=[batch.sise]", ["run.allow_changes", "did you mean batch.size"]),
]


@pytest.mark.parametrize("settings, told", WRONG, ids=[settings for settings, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name_with_what_is_meant(train: Runner, settings: str, told: list[str]) -> None:
    made.shards(train.folder / "set", [12])
    (train.folder / "broken.yaml").write_text("batch:\n  size: [8\n")
    finished = train.run(made.config(train.folder), "steps=3", *shlex.split(settings))
    message = refused(train, finished, USAGE)
    assert [text for text in told if text not in message] == []


def test_lanes_that_two_processes_cannot_share_are_refused_once(train: Runner) -> None:
    made.shards(train.folder / "set", [12])
    settings = (made.config(train.folder), "steps=3", "batch.size=9", "batch.lanes=3")
    message = refused(train, train.run(*settings, processes=2), USAGE)
    assert "batch.lanes: 3 lanes cannot be shared by 2 processes" in message and "run on 3 or 1 processes" in message


# --- data ---


def nothing(folder: Path) -> None:
    folder.mkdir()


def cut_parquet(folder: Path) -> None:
    file = made.shards(folder, [12, 12]) / "train-00001-of-00002.parquet"
    file.write_bytes(file.read_bytes()[:-200])


def loose_pictures(folder: Path) -> None:
    folder.mkdir()
    (folder / "1.png").write_bytes(made.png(1))


def label_outside(folder: Path) -> None:
    made.shards(folder, [6, 6], label=lambda number: 7 if number == 8 else number % 3)


def no_labels_there(folder: Path) -> None:
    lines = made.json_lines(folder, [12]) / "train-00000-of-00001.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    rows[5]["label"] = None
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))


def two_sizes(folder: Path) -> None:
    made.class_folders(folder, range(12))
    Image.new("RGB", (9, 8)).save(folder / "train" / "class1" / "004.png")


def twelve(folder: Path) -> None:
    made.class_folders(folder, range(12))


def picture_missing(folder: Path) -> None:
    (made.json_lines(folder, [12]) / "pictures" / "4.png").unlink()


DATA: list[tuple[Callable[[Path], None] | None, str, list[str]]] = [
    (None, "data.path=./nowhere", ["no such file or folder", "/nowhere"]),
    (nothing, "", ["/set"]),
    (cut_parquet, "", ["train-00001-of-00002.parquet"]),
    (loose_pictures, "", ["no class folders found", "wanted: train/CLASS/picture.jpg"]),
    (label_outside, "data.classes=3", ["train-00001-of-00002.parquet row 2: label 7 is outside 0..2"]),
    (no_labels_there, "", ["train-00000-of-00001.jsonl row 5: the label is missing"]),
    (two_sizes, "", ["train/class1/004.png", "(3, 8, 9)", "(3, 8, 8)", "add Resize"]),
    (
        twelve,
        "data.transforms.train=['tests.spies_failure:odd_as_float']",
        [".png is of type torch.", "must have one type"],
    ),
    (picture_missing, "", ["train-00000-of-00001.jsonl row 4", "4.png"]),
]


@pytest.mark.parametrize("make, settings, told", DATA, ids=[make.__name__ if make else settings for make, settings, _ in DATA])
def test_bad_data_is_refused_with_the_file_and_the_row(
    train: Runner, make: Callable[[Path], None] | None, settings: str, told: list[str]
) -> None:
    if make:
        make(train.folder / "set")
    message = refused(train, train.run(made.config(train.folder), LINEAR, "steps=6", *settings.split()), FAILED)
    assert [text for text in told if text not in message] == []


@pytest.mark.slow
def test_a_name_of_the_hub_without_a_network_ends_in_one_line(train: Runner) -> None:
    train.environment |= dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), "http://127.0.0.1:9")
    settings = (made.config(train.folder), LINEAR, "steps=6", "data.path=some-org/some-set")
    message = refused(train, train.run(*settings), FAILED)
    assert "data.path" in message and "some-org/some-set" in message and len(message.splitlines()) == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_extra_columns_of_text_and_ragged_lists_change_nothing(tmp_path: Path, processes: int) -> None:
    found = []
    for name in ("plain", "extra"):
        train = Runner(tmp_path / name)
        made.shards(train.folder / "set", [13, 11])
        for file in (train.folder / "set").glob("*.parquet") if name == "extra" else ():
            table = pq.read_table(file)
            texts = pa.array(["x" * row for row in range(len(table))])
            tags = pa.array([["a"] * (row % 3) for row in range(len(table))])
            pq.write_table(table.append_column("text", texts).append_column("tags", tags), file)
        finished = train.run(made.config(train.folder), LINEAR, "steps=4", processes=processes)
        assert finished.code == 0, finished.output
        found.append(left.weights(train))
    assert found[0] == found[1]


def test_paths_mean_the_same_from_any_folder_with_blanks_and_through_links(tmp_path: Path) -> None:
    made.shards(tmp_path / "the set", [13, 11])
    (tmp_path / "link").symlink_to(tmp_path / "the set")
    (tmp_path / "my configs").mkdir()
    text = (tmp_path / made.config(tmp_path)).read_text()
    (tmp_path / "my configs" / "a.yaml").write_text(text.replace("path: set", "path: ../the set"))
    (tmp_path / "my configs" / "b.yaml").write_text(text.replace("path: set", "path: $ABOVE/the set"))
    (tmp_path / "my configs" / "c.yaml").write_text(text.replace("path: set", "path: ../link"))
    found = {}
    for file, named in [
        ("a", "../my configs/a.yaml"),
        ("b", str(tmp_path / "my configs" / "b.yaml")),
        ("c", "../my configs/c.yaml"),
    ]:
        train = Runner(tmp_path / f"from {file}", {"ABOVE": str(tmp_path)})
        train.folder.mkdir()
        finished = train.run(named, LINEAR, "steps=3")
        assert finished.code == 0, finished.output
        found[file] = left.folder(train).name, left.weights(train)
    assert found["a"] == found["b"]  # the same run by its name, too
    assert found["c"][1] == found["a"][1]


# --- pictures that cannot be read ---

BAD = 4  # the sample that is spoilt
NAME = "train/class1/004.png"


def cut_jpeg() -> bytes:
    return jpeg()[:-300]


def empty() -> bytes:
    return b""


def text() -> bytes:
    return b"<html>404 Not Found</html>"


def bad_checksum() -> bytes:
    data = bytearray(made.png(BAD))
    place = data.index(b"IDAT")
    data[place + 10] ^= 255
    return bytes(data)


def jpeg(**options: object) -> bytes:
    data = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").resize((8, 8)).resize((64, 64)).save(data, "jpeg", **options)
    return data.getvalue()


SPOILT = [(cut_jpeg, 0, 1), (empty, 2, 1), (text, 0, 2), (bad_checksum, 2, 2)]
NAMES = [spoilt.__name__ for spoilt, _, _ in SPOILT]
SETTINGS = ("steps=6", "batch.size=4", "batch.lanes=2")  # two epochs of twelve


def folders(train: Runner, spoilt: Callable[[], bytes] | None = None) -> str:
    made.class_folders(train.folder / "set", range(12))
    if spoilt:
        (train.folder / "set" / NAME).write_bytes(spoilt())
    return made.config(train.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Spied:
    train = Runner(tmp_path_factory.mktemp("whole"))
    return spied(train, folders(train), *SETTINGS)


@pytest.mark.parametrize("spoilt, workers, processes", SPOILT, ids=NAMES)
def test_a_picture_that_cannot_be_read_stops_the_run_with_its_file(
    train: Runner, spoilt: Callable[[], bytes], workers: int, processes: int
) -> None:
    finished = train.run(folders(train, spoilt), *SETTINGS, f"data.workers={workers}", processes=processes)
    assert finished.code == FAILED, finished.output
    assert f"error: {NAME}: " in finished.output and "data.on_error=skip" in finished.output
    assert "Traceback" not in finished.output
    assert not list(train.outputs.glob("*/checkpoints/*step-*"))


@pytest.mark.parametrize("spoilt, workers, processes", SPOILT, ids=NAMES)
def test_with_skip_that_sample_alone_is_left_out_counted_and_listed(
    train: Runner, whole: Spied, spoilt: Callable[[], bytes], workers: int, processes: int
) -> None:
    settings = (folders(train, spoilt), *SETTINGS, "data.on_error=skip", f"data.workers={workers}")
    found = spied(train, *settings, processes=processes)
    wanted = [[number for number in step if number != BAD] for step in whole.steps(lanes=2)]
    assert sum(len(step) for step in wanted) == 22  # of two epochs of twelve
    assert found.steps(lanes=2) == wanted
    assert found.summary["skipped"] == 2
    assert found.output.count(f"skipped {NAME}: ") == 2


def test_a_lane_without_any_readable_sample_counts_nothing_in_the_mean(tmp_path: Path) -> None:
    hashes = set()
    for processes in (1, 2, 4):
        train = Runner(tmp_path / str(processes))
        settings = (folders(train, empty), "steps=6", "batch.size=4", "batch.lanes=4", "data.on_error=skip", "data.shuffle=false")
        workers = f"data.workers={processes % 2}"
        found = spied(train, *settings, workers, "model.zero=true", processes=processes)
        assert found.summary["skipped"] == 2
        # All weights are zero at first, so that each sample's loss is the logarithm of the number of classes.
        assert found.metrics[0]["train/loss"] == pytest.approx(math.log(3), rel=1e-6)
        hashes.add(found.weights)
    assert len(hashes) == 1


def test_in_an_evaluation_a_bad_sample_is_left_out_of_the_mean(train: Runner) -> None:
    config = folders(train)
    made.class_folders(train.folder / "set", range(12), "validation")
    (train.folder / "set" / "validation" / "class1" / "004.png").write_bytes(b"")
    settings = (config, "steps=1", "batch.size=4", "batch.lanes=2", "evaluate.every=1", "data.on_error=skip", "model.zero=true")
    finished = train.run(*settings, "optimizer.lr=1e-60", "model.norm=false", "model.dropout=0")
    assert finished.code == 0, finished.output
    assert "skipped validation/class1/004.png" in finished.output
    metrics = left.summary(train)["metrics"]
    assert metrics["validation/loss"] == pytest.approx(math.log(3), rel=1e-6)
    assert metrics["validation/accuracy"] == 4 / 11  # all scores are equal, so that class 0 is said: 4 of the 11 that are left


def test_an_exif_rational_with_denominator_zero_is_no_reason_to_refuse_a_picture(train: Runner) -> None:
    config = folders(train)
    # One IFD entry: XResolution (0x011A), type rational (5), count 1, at offset 26: 72 / 0.
    exif = b"Exif\0\0MM\0*" + struct.pack(">IHHHIIIII", 8, 1, 0x011A, 5, 1, 26, 0, 72, 0)
    for file in (train.folder / "set").rglob("*.png"):
        file.write_bytes(jpeg(exif=exif))
    finished = train.run(config, LINEAR, "steps=3")
    assert finished.code == 0, finished.output


def test_all_samples_bad_is_said_instead_of_training_on_nothing(train: Runner) -> None:
    config = folders(train)
    for file in (train.folder / "set").rglob("*.png"):
        file.write_bytes(b"")
    message = refused(train, train.run(config, *SETTINGS, "data.on_error=skip"), FAILED)
    assert "none of the first 64 samples can be read" in message and "the file is empty" in message
