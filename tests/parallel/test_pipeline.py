"""A model in stages on several processes: what can be cut, and what is refused with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import Runner

CUT = "parallel.pipeline={stages: 2, split_at: [middle]}"


@pytest.fixture
def spy(train: Runner) -> str:
    made.shards(train.folder / "set", [12, 9])
    made.shards(train.folder / "set", [7], "validation")
    return made.config(train.folder)


def of(name: str) -> str:
    """The whole section, since arguments of another model would be refused."""
    return f"model={{name: 'tests.parallel.nets:{name}'}}"


@pytest.mark.slow
def test_values_that_go_around_a_stage_and_weights_without_gradient_train_as_in_one_process(
    train: Runner, spy: str, tmp_path: Path
) -> None:
    """A residual connection over two cuts, a frozen layer, and one that the loss does not use, which is kept as it was."""
    single = Runner(tmp_path / "single")
    made.shards(single.folder / "set", [12, 9])
    made.shards(single.folder / "set", [7], "validation")
    run = (of("Residual"), "steps=3", "checkpoint.every=1", "evaluate.every=3")
    for cut, processes in (("[middle]", 2), ("[middle, last]", 3)):
        stages = f"parallel.pipeline={{stages: {processes}, split_at: {cut}}}"
        finished = train.run(spy, *run, stages, f"run.name=p{processes}", processes=processes)
        assert finished.code == 0, finished.output
    assert single.run(made.config(single.folder), *run).code == 0
    folders = sorted(train.outputs.iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert left.facts(folder)["weights_sha256"] == left.weights(single)
        assert left.facts(folder)["metrics"] == left.summary(single)["metrics"]


@pytest.mark.parametrize(
    ("settings", "processes", "words"),
    [
        (("batch.lanes=1", CUT), 2, ["batch.lanes: 1 lane cannot fill 2 pipeline stages", "set batch.lanes to 2 or more"]),
        (("batch.lanes=3", "batch.size=8", CUT), 2, ["3 lanes do not divide batch.size 8"]),
        ((CUT,), 1, ["2 stages need 2 processes, and 1 runs"]),
        ((CUT,), 4, ["2 stages need 2 processes, and 4 run"]),
        (("parallel.pipeline={stages: 2}",), 2, ["2 stages need 1 modules to cut at, not 0"]),
        (("parallel.pipeline={stages: 2, split_at: [midle]}",), 2, ["no module midle; did you mean middle?"]),
        (("parallel.pipeline={stages: 2, split_at: [unused]}",), 2, ["cut the model into 1 stages, not 2"]),
        (("data.on_error=skip", CUT), 2, ["data.on_error: skip is not possible in a pipeline"]),
        ((of("Tied"), "parallel.pipeline={stages: 2, split_at: [other]}"), 2, ["one.weight and other.weight are one weight"]),
        ((of("Branching"), "parallel.pipeline={stages: 2, split_at: [last]}"), 2, ["this model cannot be cut"]),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_before_the_first_step(
    train: Runner, spy: str, settings: tuple[str, ...], processes: int, words: list[str]
) -> None:
    finished = train.run(spy, of("Residual"), "steps=2", *settings, processes=processes)
    assert finished.code == 2, finished.output
    for word in words:
        assert word in finished.output, finished.output
    assert "Traceback" not in finished.output
