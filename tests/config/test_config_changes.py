"""What a run is called, and what a resume accepts."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from train.config import Config, Effect, differences, effect, flatten, load, recorded, verdict

Load = Callable[..., Config]
Refuse = Callable[..., list[str]]


def test_a_resolved_configuration_reads_back_as_itself(read: Load, folder: Path) -> None:
    text = (
        "model: {name: x, a: '1e-4', b: 1e-4, c: '0o7', d: 'null', e: 'yes', f: '', g: [~, '07', 1e20], "
        "h: {i: '2020-01-01'}, 1: 'ü:', j: \"a\\x85\\n\\tb\"}\n"
        "data: {path: ./d, subset: '~', validation_path: null, transforms: {train: [Flip, {Crop: {size: '3'}}]}}\n"
        "evaluate: {every: 2 epochs}\ncheckpoint: {every: 7}\nrun: {threads: 3, name: 012, resume_from: old}\n"
    )
    config = read(text)
    (folder / "elsewhere").mkdir()
    again = folder / "elsewhere" / "config.yaml"
    again.write_text(config.to_yaml(), encoding="utf-8")
    assert load([again])[0] == config
    assert load([again])[0].folder == config.folder
    assert config.model.arguments["a"] == "1e-4" and config.model.arguments["b"] == 0.0001
    assert config.model.arguments["j"] == "a\x85\n\tb"


def test_other_yaml_readers_see_the_same_values_in_a_resolved_configuration(read: Load) -> None:
    config = read("optimizer: {lr: 1e-5, betas: [0.9, 1e-7]}\ndata: {subset: 'no', revision: '1e5'}\nrun: {name: 012}")
    seen = yaml.safe_load(config.to_yaml())
    assert math.isclose(seen["optimizer"]["lr"], 1e-5) and math.isclose(seen["optimizer"]["betas"][1], 1e-7)
    assert (seen["data"]["subset"], seen["data"]["revision"], seen["run"]["name"]) == ("no", "1e5", "012")


@pytest.mark.parametrize(
    "same",
    [
        "run.name=x",
        "run.output_dir=o",
        "data.workers=3",
        "evaluate.every=1",
        "checkpoint.keep=9",
        "steps=11",
        "epochs=3",
        "evaluate.patience=3",
        "tracking.wandb=offline",
        "data.transforms.validation=[Flip]",
        "optimizer.lr=1e-2",
    ],
)
def test_a_run_keeps_its_name_when_its_numbers_stay(read: Load, same: str) -> None:
    assert read("", same).identity() == read().identity()


@pytest.mark.parametrize(
    "other",
    [
        "run.seed=1",
        "run.determinism=fast",
        "batch.size=16",
        "batch.lanes=2",
        "optimizer.lr=0.1",
        "optimizer.momentum=0.9",
        "model.width=2",
        "data.path=org/other",
        "data.shuffle=no",
        "data.transforms.train=[Flip]",
        "schedule.name=cosine",
        "data.image.mode=GRAY",
        "ema.decay=0.9",
        "schedule.warmup=1",
        "data.revision=v1",
    ],
)
def test_a_run_gets_another_name_when_its_numbers_change(read: Load, other: str) -> None:
    assert read("", other).identity() != read().identity()


def test_the_length_is_part_of_the_name_where_the_learning_rate_follows_it(read: Load) -> None:
    for schedule, follows in {"constant": False, "step": False, "linear": True, "cosine": True, "one_cycle": True}.items():
        text = f"schedule: {{name: {schedule}}}"
        assert (read(text, "steps=11").identity() != read(text).identity()) is follows, schedule


def test_a_run_has_the_same_name_wherever_its_data_lie(read: Load) -> None:
    names = [read("", f"data.path={path}").identity() for path in ("/a/cifar", "/mnt/b/cifar", "/a/mnist")]
    assert names[0] == names[1] != names[2]
    shards = [read("", f"data.path={path}").identity() for path in ("/a/c/*.tar", "/b/c/*.tar", "/a/d/*.tar")]
    assert shards[0] == shards[1] != shards[2]


def test_the_folder_is_the_name_and_eight_hex_digits(read: Load, folder: Path) -> None:
    config = read("run: {name: my.run, output_dir: out}")
    name, _, digits = config.folder.name.rpartition("-")
    assert config.folder.parent == folder / "out" and name == "my.run"
    assert len(digits) == 8 and int(digits, 16) >= 0


def test_the_name_is_the_same_in_another_process(read: Load, folder: Path) -> None:
    code = "from pathlib import Path; from train.config import load; print(load([Path('needed.yaml')])[0].identity())"
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == read().identity()


def refusals(old: Config, new: Config) -> dict[str, str]:
    found = [(difference.key, verdict(difference, new)) for difference in differences(old, new)]
    return {key: reason for key, reason in found if reason}


def test_a_resume_lists_what_changed_with_both_values(read: Load) -> None:
    old, new = read("optimizer: {momentum: 0.9}"), read("optimizer: {lr: 0.1}", "tracking.every=1")
    assert [tuple(difference) for difference in differences(old, new)] == [
        ("optimizer.lr", 0.01, 0.1, "numbers"),
        ("optimizer.momentum", 0.9, None, "numbers"),
        ("tracking.every", 10, 1, "report"),
    ]
    assert differences(old, old) == []


def test_data_that_were_moved_are_the_same_data_by_name(read: Load) -> None:
    assert refusals(read("", "data.path=/a/mnist"), read("", "data.path=/mnt/b/mnist")) == {}
    assert list(refusals(read("", "data.path=/a/mnist"), read("", "data.path=/a/cifar"))) == ["data.path"]


@pytest.mark.parametrize(
    "change, changed",
    [
        ("optimizer.lr=0.1", "updates"),
        ("batch.size=16", "position"),
        ("batch.lanes=4", "gradients"),
        ("run.seed=1", "order"),
        ("data.path=/other", "samples"),
        ("data.image.mode=GRAY", "shown"),
        ("model.width=8", "weights"),
        ("schedule.name=step", "learning rate"),
    ],
)
def test_a_change_of_the_numbers_is_refused_on_resume_unless_it_is_allowed(read: Load, change: str, changed: str) -> None:
    key = change.partition("=")[0]
    section = key.partition(".")[0]
    refused = refusals(read(), read("", change))
    assert list(refused) == [key] and changed in refused[key]
    for allowed in (key, section):
        assert refusals(read(), read("", change, f"run.allow_changes=[{allowed}]")) == {}
    assert list(refusals(read(), read("", change, "run.allow_changes=[ema]"))) == [key]


@pytest.mark.parametrize(
    "change", ["tracking.every=1", "data.workers=0", "checkpoint.keep=5", "run.name=x", "evaluate.patience=2"]
)
def test_a_change_beside_the_numbers_is_accepted_on_resume(read: Load, change: str) -> None:
    assert len(differences(read(), read("", change))) == 1
    assert refusals(read(), read("", change)) == {}


def test_a_longer_run_is_accepted_on_resume_unless_the_learning_rate_follows_the_length(read: Load) -> None:
    assert refusals(read("epochs: 2"), read("epochs: 3")) == {}
    cosine = "schedule: {name: cosine}\nepochs: "
    assert "learning rate" in refusals(read(cosine + "2"), read(cosine + "3"))["epochs"]
    assert refusals(read(cosine + "2"), read(cosine + "3", "run.allow_changes=[epochs]")) == {}


def test_a_misspelt_key_in_allow_changes_is_refused(refused: Refuse) -> None:
    (line,) = refused("", "run.allow_changes=[optimizer.momentum, optimizer.l, bach.size]")
    assert "bach.size" in line and "batch.size" in line


def test_every_key_has_an_effect(read: Load) -> None:
    keys = flatten(read())
    assert len(keys) > 40
    assert all(isinstance(effect(key), Effect) for key in keys)
    assert effect("model.any_argument") == Effect.NUMBERS
    assert effect("nothing") is None and effect("batch.nothing") is None


def test_a_configuration_cannot_be_changed(read: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().run.__setattr__("seed", 3)


def test_reading_a_configuration_does_not_load_torch() -> None:
    code = "import sys, train.config; print([m for m in ('torch', 'datasets', 'accelerate', 'wandb') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


def test_a_record_of_an_older_program_is_read_without_the_keys_that_are_no_more(read: Load) -> None:
    config = read()
    content = config.model_dump(mode="json")
    content["tracking"]["trace"] = 3
    assert recorded(content) == config
    content["tracking"]["trait"] = 3
    with pytest.raises(ValidationError, match=r"tracking\.trait"):
        recorded(content)
