"""What is wrong is told at once: which key, where, what was meant, what is allowed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from train.config import Problem, load, unknown_argument
from train.errors import UsageError

Refuse = Callable[..., list[str]]


@pytest.mark.parametrize(
    "text, line, key, meant",
    [
        ("stesp: 3", 1, "stesp", "steps"),
        ("optimizers: {lr: 1}", 1, "optimizers", "optimizer"),
        ("evaluate:\n  evry: 3", 2, "evaluate.evry", "evaluate.every"),
        ("data:\n  image:\n    maen: [0]", 3, "data.image.maen", "data.image.mean"),
        ("data:\n  size: 3", 2, "data.size", "batch.size"),
        ("seed: 3", 1, "seed", "run.seed"),
        ("batch_size: 3", 1, "batch_size", "batch.size"),
        ("data:\n  shuffle-block: 3", 2, "data.shuffle-block", "data.shuffle_block"),
        ("run:\n  outputdir: x", 2, "run.outputdir", "run.output_dir"),
        ("Batch: {size: 3}", 1, "Batch", "batch"),
        ("run:\n  Seed: 3", 2, "run.Seed", "run.seed"),
        ("learning-rate: 3", 1, "learning-rate", "optimizer.lr"),
        ("lerning_rate: 3", 1, "lerning_rate", "optimizer.lr"),
    ],
)
def test_a_misspelt_key_is_refused_with_its_line_and_the_nearest_name(
    refused: Refuse, text: str, line: int, key: str, meant: str
) -> None:
    (message,) = refused(text)
    assert message.startswith(f"my.yaml:{line}: {key}: unknown key; did you mean {meant}? (allowed: ")
    (message,) = refused("", f"{key}=3")
    assert message.startswith(f"command line: {key}: unknown key; did you mean {meant}? (allowed: ")


def test_a_key_like_no_other_is_refused_with_the_allowed_ones(refused: Refuse) -> None:
    assert refused("batch:\n  zzz: 1") == ["my.yaml:2: batch.zzz: unknown key (allowed: size, lanes)"]


def test_a_dotted_key_in_a_file_is_told_how_to_be_written(refused: Refuse) -> None:
    (line,) = refused("optimizer.lr: 3")
    assert "`optimizer: {lr: ...}`" in line


def test_a_key_given_twice_is_refused_with_both_lines(refused: Refuse) -> None:
    assert refused("optimizer:\n  lr: 1\n  name: SGD\n  lr: 2") == [
        "my.yaml:4: optimizer.lr: given twice; the first is on line 2"
    ]


def test_missing_keys_are_named_with_what_they_are(folder: Path) -> None:
    Path("empty.yaml").write_text("steps: 3")
    with pytest.raises(UsageError) as error:
        load([Path("empty.yaml")])
    lines = str(error.value).splitlines()
    assert [line.partition(": is needed: ")[0] for line in lines] == [
        "empty.yaml: data.path",
        "empty.yaml: model.name",
        "empty.yaml: batch.size",
    ]


def test_all_problems_are_told_at_once(refused: Refuse) -> None:
    lines = refused("optimizer:\n  lr: x\n  lr: y\nbatch: {sise: 3}\n", "run.seed=-1", "speed", "evaluate.every=soon")
    told = sorted(line.split(": ")[1] for line in lines)
    assert told == ["batch.sise", "evaluate.every", "optimizer.lr", "optimizer.lr", "run.seed", "speed"]


def test_an_empty_path_is_told_what_it_must_be(refused: Refuse) -> None:
    assert refused("", "data.tokenizer=", "run.output_dir=null") == [
        "command line: run.output_dir: must be a path, not empty",
        "command line: data.tokenizer: must be bytes or a path, not empty",
    ]


def takes_momentum(values: Mapping[str, Any]) -> list[Problem]:
    return [
        unknown_argument("optimizer", key, ["momentum"]) for key in values if key not in ("name", "lr", "clip_norm", "momentum")
    ]


def test_an_argument_that_another_room_refuses_is_told_beside_all_other_problems(refused: Refuse) -> None:
    text = "optimizer:\n  lr: x\n  momentun: 0.9\n  lrr: 1\nbatch:\n  sise: 2"
    lines = refused(text, checks={"optimizer": takes_momentum})
    allowed = "(allowed: name, lr, clip_norm, momentum)"
    assert f"my.yaml:3: optimizer.momentun: unknown key; did you mean optimizer.momentum? {allowed}" in lines
    assert f"my.yaml:4: optimizer.lrr: unknown key; did you mean optimizer.lr? {allowed}" in lines
    assert {line.split(": ")[1] for line in lines} == {"optimizer.lr", "optimizer.momentun", "optimizer.lrr", "batch.sise"}


def test_a_check_gets_the_values_that_could_be_read_and_the_defaults(refused: Refuse) -> None:
    seen = []

    def look(values: Mapping[str, Any]) -> list[Problem]:
        seen.append(values)
        return [Problem("train.1.Crop", "no")]

    text = "data:\n  transforms:\n    train:\n    - Flip\n    - Crop: {size: 3}\n    validation: 3"
    lines = refused(text, checks={"data.transforms": look, "optimizer": takes_momentum})
    assert seen == [{"train": ("Flip", {"Crop": {"size": 3}}), "validation": ()}]
    assert "my.yaml:5: data.transforms.train.1.Crop: no" in lines


def test_a_check_does_not_judge_a_section_whose_name_is_missing(folder: Path) -> None:
    Path("my.yaml").write_text("steps: 3\nmodel: {width: 3}")
    with pytest.raises(UsageError) as error:
        load([Path("my.yaml")], checks={"model": lambda values: [Problem("width", "judged")]})
    assert "judged" not in str(error.value) and "model.name: is needed" in str(error.value)


def test_a_check_does_not_judge_the_arguments_of_a_name_that_is_wrong(refused: Refuse) -> None:
    (line,) = refused("optimizer: {name: [Adam], eps: 1}", checks={"optimizer": takes_momentum})
    assert line.startswith("my.yaml:1: optimizer.name: must be text")
