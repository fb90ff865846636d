"""A value means what its key declares, and a path what the place says where it was written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from train.config import Config, Every, load

NEEDED = "data: {path: org/name}\nmodel: {name: tiny}\nbatch: {size: 8}\nsteps: 10\n"

Load = Callable[..., Config]
Refuse = Callable[..., list[str]]


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("1e4", 1e4), ("5E-3", 0.005), ("'0.1'", 0.1), ("3", 3.0)])
def test_a_number_may_be_written_as_people_write_numbers(read: Load, text: str, value: float) -> None:
    for config in (read(f"optimizer:\n  lr: {text}"), read("", f"optimizer.lr={text}")):
        assert config.optimizer.lr == value and isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(
    "key, text",
    [
        *[("optimizer.lr", text) for text in ("abc", "-1", "0", ".nan", "nan", "inf", "1e999", "null", "[1]", "true")],
        *[("steps", text) for text in ("1.5", "0", "-3", "ten", "true")],
        *[("batch", text) for text in ("true", "8", "null", "[8]")],
        *[("run.name", text) for text in ("a/b", "''", "two words", "x" * 65, "null")],
        *[("run.determinism", text) for text in ("yes", "Strict")],
        *[("batch.lanes", text) for text in ("0", "many", "2.5")],
        *[("evaluate.every", text) for text in ("-1", "epoch", "1.5 epochs", "often", "null")],
        *[("data.image.std", text) for text in ("[0.0]", "[1, 1]", "[]", "0.5", "[a]")],
        *[("data.transforms.train", text) for text in ("Flip", "[[a]]", "[{a: 1}]", "[{a: {}, b: {}}]")],
        ("run.seed", str(2**63)),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_line_and_what_is_allowed(refused: Refuse, key: str, text: str) -> None:
    *above, last = key.split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(above)] + [f"{'  ' * len(above)}{last}: {text}"]
    (line,) = {line.partition(" must ")[0] for line in refused("\n".join(lines))}
    assert line.startswith(f"my.yaml:{len(lines)}: {key}")
    (line,) = {line.partition(" must ")[0] for line in refused("", f"{key}={text}")}
    assert line.startswith(f"command line: {key}")


def test_a_refusal_says_what_is_allowed_and_what_was_given(refused: Refuse) -> None:
    assert refused("run:\n  threads: some\n  determinism: loose") == [
        "my.yaml:3: run.determinism: must be strict or fast, not 'loose'",
        "my.yaml:2: run.threads: must be auto or a whole number, not 'some'",
    ]
    assert refused("batch: {lanes: 0}") == ["my.yaml:1: batch.lanes: must be auto or at least 1, not '0'"]
    assert refused("optimizer: SGD") == ["my.yaml:1: optimizer: must be a section with keys below it, not 'SGD'"]


@pytest.mark.parametrize("text", ["012", "1_000", "no", "off", "1e5", "0x10", "true"])
def test_text_stays_as_it_is_written_where_text_is_declared(read: Load, text: str) -> None:
    assert read(f"run: {{name: {text}}}").run.name == text
    assert read("", f"run.name={text}").run.name == text


def test_a_time_and_a_date_are_text_too(read: Load) -> None:
    assert read("data:\n  subset: 12:30\n  revision: 2020-01-02").data.subset == "12:30"
    assert read("data:\n  subset: 12:30\n  revision: 2020-01-02").data.revision == "2020-01-02"


@pytest.mark.parametrize("text", ["null", "~", "", "Null"])
def test_an_optional_key_can_be_emptied(read: Load, text: str) -> None:
    assert read("optimizer: {clip_norm: 2}").optimizer.clip_norm == 2
    assert read(f"optimizer:\n  clip_norm: {text}").optimizer.clip_norm is None
    assert read("optimizer: {clip_norm: 2}", f"optimizer.clip_norm={text}").optimizer.clip_norm is None
    assert read("data: {subset: 'null'}").data.subset == "null"


@pytest.mark.parametrize(
    "word, value",
    [*((w, True) for w in ("true", "True", "yes", "on", "1")), *((w, False) for w in ("false", "False", "no", "off", "0"))],
)
def test_a_switch_reads_the_same_words_in_a_file_and_on_the_command_line(read: Load, word: str, value: bool) -> None:
    opposite = f"data: {{shuffle: {not value}}}"
    assert read(f"data:\n  shuffle: {word}").data.shuffle is value
    assert read(opposite, f"data.shuffle={word}").data.shuffle is value
    assert read(f"data:\n  shuffle: '{word}'").data.shuffle is value


@pytest.mark.parametrize("word", ["", "''", "maybe", "2", "t", "n", "null", "[true]"])
def test_a_switch_refuses_any_other_word(refused: Refuse, word: str) -> None:
    (in_file,) = refused(f"data:\n  shuffle: {word}")
    (on_command_line,) = refused("", f"data.shuffle={word}")
    assert in_file.startswith("my.yaml:2: data.shuffle: must be true or false")
    assert on_command_line.startswith("command line: data.shuffle: must be true or false")


@pytest.mark.parametrize(
    "text, every", [("500", Every(500)), ("0", Every(0)), ("1 epoch", Every(1, "epochs")), ("2 epochs", Every(2, "epochs"))]
)
def test_an_interval_is_in_steps_or_in_epochs(read: Load, text: str, every: Every) -> None:
    assert read(f"checkpoint: {{every: {text}}}").checkpoint.every == every
    assert str(every) == text


def test_arguments_without_a_declared_type_follow_yaml_1_2(read: Load) -> None:
    text = "model: {a: 012, b: 0x1F, c: no, d: 12:30, e: 1e-4, f: true, g: ~, h: '7', i: [1, 2.5, x], j: {k: 3}, l: -.5, m: 0o17}"
    assert read(text).model.arguments == {
        "a": 12,
        "b": 31,
        "c": "no",
        "d": "12:30",
        "e": 0.0001,
        "f": True,
        "g": None,
        "h": "7",
        "i": [1, 2.5, "x"],
        "j": {"k": 3},
        "l": -0.5,
        "m": 15,
    }


def test_a_list_replaces_and_can_be_said_on_the_command_line(read: Load) -> None:
    config = read("optimizer: {betas: [0.8, 0.9]}\ndata: {transforms: {train: [Flip]}}", "optimizer.betas=[0.9,0.95]")
    assert config.optimizer.arguments == {"betas": [0.9, 0.95]}
    assert config.data.transforms.train == ("Flip",)
    assert read("data: {transforms: {train: [Flip]}}", "data.transforms.train=[]").data.transforms.train == ()


def test_a_transform_is_a_name_or_a_name_with_arguments(read: Load) -> None:
    config = read("data:\n  transforms:\n    train:\n    - Flip\n    - Crop: {size: 32, pad: 0.5}\n    - Blur:\n")
    assert config.data.transforms.train == ("Flip", {"Crop": {"size": 32, "pad": 0.5}}, "Blur")


def test_plain_text_on_the_command_line_needs_no_quoting(read: Load) -> None:
    assert read("", "data.path=/my data #1/a: b").data.path == "/my data #1/a: b"
    assert read("", "data.subset=*all").data.subset == "*all"
    assert read("", "data.subset='a # b'").data.subset == "a # b"
    assert read("", "data.subset=a=b").data.subset == "a=b"


def test_lanes_that_do_not_divide_the_batch_are_refused_with_those_that_do(refused: Refuse) -> None:
    (line,) = refused("batch:\n  size: 32\n  lanes: 3")
    assert line.startswith("my.yaml:3: batch.lanes: ")
    assert "3 lanes" in line and "32" in line and line.endswith("2 and 4")
    assert refused("batch: {size: 32, lanes: 64}")[0].endswith(": 32")


def test_exactly_one_of_steps_and_epochs_is_needed(folder: Path, refused: Refuse) -> None:
    assert refused("steps: 5\nepochs: 2") == ["my.yaml:2: epochs: give one of steps and epochs, not both"]
    assert refused("steps: null") == ["my.yaml: epochs: give one of steps and epochs"]


def test_a_layer_that_gives_steps_takes_back_the_epochs_below_it(read: Load) -> None:
    assert (read("epochs: 3").steps, read("epochs: 3").epochs) == (None, 3)
    assert (read("epochs: 3", "steps=4").steps, read("epochs: 3", "steps=4").epochs) == (4, None)


def test_a_relative_path_is_relative_to_the_file_that_says_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("here", "configs", "my data", "elsewhere"):
        (folder / path).mkdir()
    file = folder / "configs" / "my.yaml"
    file.write_text(NEEDED.replace("org/name", "../my data") + "run: {output_dir: ../out}")
    seen = set()
    for cwd in ("here", "elsewhere"):
        monkeypatch.chdir(folder / cwd)
        config, _ = load([Path("../configs/my.yaml")])
        assert config.data.path == str(folder / "my data")
        assert config.run.output_dir == folder / "out"
        seen.add(config.folder)
        assert load([file], ["run.output_dir=out"])[0].run.output_dir == folder / cwd / "out"
    assert len(seen) == 1


def test_a_default_folder_is_under_the_working_directory_of_the_run(
    read: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read().run.output_dir == folder / "outputs"
    (folder / "deep").mkdir()
    monkeypatch.chdir(folder / "deep")
    assert load([folder / "needed.yaml"])[0].run.output_dir == folder / "deep" / "outputs"


def test_home_and_variables_are_filled_in_once(read: Load, refused: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOCKSTEP_TEST_ROOT", "/mnt/big disk")
    monkeypatch.delenv("LOCKSTEP_TEST_UNSET", raising=False)
    assert read("data: {path: ~/d}").data.path == "/home/ada/d"
    config = read("data: {path: $LOCKSTEP_TEST_ROOT/d}", "run.output_dir=${LOCKSTEP_TEST_ROOT}/out")
    assert (config.data.path, config.run.output_dir) == ("/mnt/big disk/d", Path("/mnt/big disk/out"))
    assert refused("data: {path: $LOCKSTEP_TEST_UNSET/d}") == [
        "my.yaml:1: data.path: the variable $LOCKSTEP_TEST_UNSET is not set"
    ]


def test_a_data_path_is_local_when_it_looks_local_or_exists(read: Load, folder: Path) -> None:
    (folder / "shards").mkdir()
    (folder / "link").symlink_to("shards")
    here = str(folder)
    for text, path in {
        "org/name": "org/name",
        "mnist": "mnist",
        "https://host/data/*.tar": "https://host/data/*.tar",
        "hf://datasets/org/name": "hf://datasets/org/name",
        "./gone": f"{here}/gone",
        "../gone": str(folder.parent / "gone"),
        "/gone": "/gone",
        "shards": f"{here}/shards",
        "link": f"{here}/link",
        "shards/*.tar": f"{here}/shards/*.tar",
        "gone/*.tar": "gone/*.tar",
        "*.parquet": f"{here}/*.parquet",
    }.items():
        assert read(f"data: {{path: '{text}', validation_path: '{text}'}}").data.path == path, text
        assert read("", f"data.validation_path={text}").data.validation_path == path, text
