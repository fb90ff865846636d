"""Files that cannot be read are refused in a line, and layers of files add up as documented."""

from collections.abc import Callable
from pathlib import Path

import pytest

from train.config import Config, Every, load
from train.errors import UsageError

NEEDED = "data: {path: org/name}\nmodel: {name: tiny}\nbatch: {size: 8}\nsteps: 10\n"

Load = Callable[..., Config]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"just words\n", "must be a mapping"),
        (b"optimizer:\n\tlr: 1\n", ":2: a tab"),
        (b"steps: 1\n---\nsteps: 2\n", ":2: a second document"),
        (b"steps: [1\n", "is not YAML"),
        (b"steps: \xff\xfe\n", "is not UTF-8"),
        ("steps: 1\n".encode("utf-16"), "is not UTF-8"),
        (b"steps: 1\nrun: \x07\n", ":2: holds a control character"),
        (b"optimizer: &o {lr: 1}\nschedule:\n  <<: *o\n", ":3: schedule.<<: merge keys are not supported"),
        (b"run: {name: !env NAME}\n", ":1: run.name: YAML tags"),
        (b"run: !!python/object:os.system {}\n", ":1: run: YAML tags"),
        (b"? [a, b]\n: 1\n", ":1: a key must be text"),
        (b"run: &r\n  name: *r\n", ":2: run.name: an alias"),
        (b"[" * 5000, "is nested too deeply"),
        (b"base: my.yaml\n", ":1: base: my.yaml: is its own base: my.yaml -> my.yaml"),
        (b"base: [a.yaml]\n", ":1: base: must be the path of one"),
        (b"base: gone.yaml\n", ":1: base: gone.yaml: no such file"),
        (b"base: $LOCKSTEP_TEST_UNSET/a.yaml\n", ":1: base: the variable $LOCKSTEP_TEST_UNSET is not set"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(folder: Path, content: bytes, said: str) -> None:
    Path("my.yaml").write_bytes(content)
    with pytest.raises(UsageError) as error:
        load([Path("needed.yaml"), Path("my.yaml")])
    (line,) = str(error.value).splitlines()
    assert line.startswith("my.yaml:") and said in line


def test_files_that_are_not_there_are_named_in_full(folder: Path) -> None:
    Path("dir").mkdir()
    with pytest.raises(UsageError) as error:
        load([Path("gone.yaml"), Path("dir")])
    gone, is_folder = str(error.value).splitlines()
    assert gone == f"gone.yaml: no such file (looked for {folder / 'gone.yaml'})"
    assert is_folder.startswith("dir: is a folder")


def test_the_nearest_name_is_offered_for_a_file_that_is_not_there(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "mnist.yaml").write_text(NEEDED, encoding="utf-8")
    with pytest.raises(UsageError, match=r"did you mean configs/mnist\.yaml\?"):
        load([Path("configs/mnist.yml")])


def test_a_byte_order_mark_does_not_become_part_of_the_first_key(folder: Path) -> None:
    Path("bom.yaml").write_bytes(b"\xef\xbb\xbf" + NEEDED.encode())
    assert load([Path("bom.yaml")])[0].data.path == "org/name"


def test_later_files_win_over_earlier_ones_over_bases_and_settings_over_all(folder: Path) -> None:
    Path("bases").mkdir()
    Path("bases/root.yaml").write_text(NEEDED + "run: {seed: 1, name: root}\nevaluate: {every: 1}\ntracking: {every: 1}\n")
    Path("bases/mid.yaml").write_text("base: root.yaml\nrun: {seed: 2}\nevaluate: {every: 2}\n")
    Path("top.yaml").write_text("base: bases/mid.yaml\nrun: {seed: 3}\ntracking: {every: 3}\n")
    Path("last.yaml").write_text("run:\n  seed: 4\n")
    config, origin = load([Path("top.yaml"), Path("last.yaml")], ["tracking.every=5"])
    assert (config.run.seed, config.run.name) == (4, "root")
    assert (config.evaluate.every, config.tracking.every) == (Every(2), 5)
    assert origin["run.seed"] == "last.yaml:2"
    assert origin["evaluate.every"] == "bases/mid.yaml:3"
    assert origin["tracking.every"] == "command line"
    assert "checkpoint.keep" not in origin


def test_a_circle_of_bases_is_refused_with_the_chain(folder: Path) -> None:
    Path("a.yaml").write_text("base: b.yaml\n")
    Path("b.yaml").write_text("base: ./a.yaml\n")
    with pytest.raises(UsageError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load([Path("a.yaml")])


@pytest.mark.parametrize("overrides", [["optimizer.eps=1", "optimizer.name=Adam"], ["optimizer.name=Adam", "optimizer.eps=1"]])
def test_another_name_leaves_the_arguments_of_the_old_one_behind(read: Load, overrides: list[str]) -> None:
    below = "optimizer: {name: SGD, lr: 0.5, clip_norm: 1, momentum: 0.9}"
    optimizer = read(below, *overrides).optimizer
    assert (optimizer.name, optimizer.lr, optimizer.clip_norm) == ("Adam", 0.5, 1)
    assert optimizer.arguments == {"eps": 1}


def test_the_same_name_again_keeps_the_arguments_also_where_it_is_the_default(read: Load) -> None:
    assert read("optimizer: {momentum: 0.9}", "optimizer.name=SGD").optimizer.arguments == {"momentum": 0.9}
    assert read("optimizer: {momentum: 0.9}", "optimizer.name=Adam").optimizer.arguments == {}
    assert read("model: {width: 4}", "model.name=other").model.arguments == {}
