"""A language model is trained like any other: right losses, and the same bits however the run is computed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests import left
from tests.conftest import ROOT, Runner
from tests.parallel.test_launches import FSDP
from tests.parallel.test_tensor import TENSOR
from tests.tasks import texts

UNIFORM = "model={name: 'tests.tasks.texts:Uniform'}"
UNTIED = "model.tied=false"


@pytest.mark.parametrize("processes", [1, 2])
def test_a_uniform_model_loses_the_logarithm_of_the_vocabulary(train: Runner, processes: int) -> None:
    texts.file(train.folder)
    settings = (texts.config(train.folder), UNIFORM, "steps=1", "optimizer={name: SGD, lr: 1e-50}", "evaluate.every=1")
    finished = train.run(*settings, processes=processes)
    assert finished.code == 0, finished.output
    [trained, evaluated] = left.lines(train)
    assert trained["train/loss"] == pytest.approx(math.log(256), abs=1e-5)
    assert evaluated["validation/loss"] == pytest.approx(math.log(256), abs=1e-5)
    assert evaluated["validation/bits_per_byte"] == pytest.approx(8, abs=1e-5)
    assert evaluated["validation/accuracy"] == 0  # all scores are equal, so that a zero byte is said, which no text holds


def run(folder: Path, *settings: str, environment: dict[str, str] | None = None, processes: int = 1) -> Runner:
    """A run to its end in a folder of its own."""
    train = Runner(folder, environment or {})
    texts.file(folder)
    finished = train.run(texts.config(folder), "steps=6", "evaluate.every=3", *settings, processes=processes)
    assert finished.code == 0, finished.output
    return train


def test_the_weights_are_the_same_bits_however_they_are_computed(tmp_path: Path) -> None:
    """On one and two processes, with data workers and without, sharded, recomputed, and resumed by another number."""
    runs = {
        "one": run(tmp_path / "one"),
        "workers": run(tmp_path / "workers", "data.workers=2"),
        "two": run(tmp_path / "two", "data.workers=1", processes=2),
        "fsdp": run(tmp_path / "fsdp", environment=FSDP, processes=2),
        "recomputed": run(tmp_path / "recomputed", "speed.recompute=[blocks.*]"),
    }
    stopped = Runner(tmp_path / "resumed")
    texts.file(stopped.folder)
    settings = (texts.config(stopped.folder), "steps=6", "evaluate.every=3")
    assert stopped.run(*settings, "--stop-at", "2", processes=2).code == 75
    assert stopped.run(*settings).code == 0
    runs["resumed"] = stopped
    assert len({left.weights(one) for one in runs.values()}) == 1, {name: left.weights(one) for name, one in runs.items()}
    assert len({tuple(left.summary(one)["metrics"].items()) for one in runs.values()}) == 1


@pytest.mark.slow
def test_a_pipeline_of_an_untied_model_gives_the_same_bits(tmp_path: Path) -> None:
    one = run(tmp_path / "one", UNTIED)
    cut = run(tmp_path / "cut", UNTIED, "parallel.pipeline={stages: 2, split_at: [blocks.1]}", processes=2)
    assert left.weights(one) == left.weights(cut)


def test_projections_that_are_cut_over_processes_give_the_same_losses(tmp_path: Path) -> None:
    columns = ("query", "key", "value", "widened")
    plan = {**{f"blocks.*.{name}": "columns" for name in columns}, "blocks.*.joined": "rows", "blocks.*.narrowed": "rows"}
    settings = ("model.dropout=0", UNTIED)
    one = run(tmp_path / "one", *settings)
    cut = run(tmp_path / "cut", *settings, f"parallel.tensor={plan}", environment=TENSOR, processes=2)
    losses = [[value for line in left.lines(done) for key, value in line.items() if key.endswith("loss")] for done in (one, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("data.classes=3", "data.image.mode=GRAY"), ["data.classes: means nothing to task language_modeling", "data.image: "]),
        (("evaluate.metric=perplexity",), ["evaluate.metric: must be auto, loss or bits_per_byte or accuracy, not 'perplexity'"]),
        (("model={name: digits_cnn}",), ["digits_cnn is built with channels, classes, of which this task knows nothing"]),
        (("model={name: torchvision/resnet18}",), ["torchvision/resnet18 is built with num_classes, of which"]),
        (("model.heads=3",), ["width 16 cannot be shared by 3 heads"]),
        (("model.heads=0",), ["depth 2, width 16 and heads 0 must be 1 or more"]),
        (("model.depth=-1",), ["depth -1, width 16 and heads 2 must be 1 or more"]),
        (("model={name: 'tests.tasks.texts:Short'}",), ["gives (1, 256) for a sample; wanted are (1, 16, 256)"]),
        (("parallel.pipeline={stages: 2, split_at: [blocks.1]}",), ["2 stages need 2 processes"]),
        (("data.validation_split=test",), ["give one of validation_fraction, validation_split and validation_path"]),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_first_step(
    train: Runner, settings: tuple[str, ...], words: list[str]
) -> None:
    texts.file(train.folder)
    finished = train.run(texts.config(train.folder), "steps=2", *settings)
    assert finished.code == 2, finished.output
    for word in words:
        assert word in finished.output, finished.output
    assert "Traceback" not in finished.output


def test_a_run_does_not_go_on_with_another_tokenizer(train: Runner) -> None:
    """The file has the same name, and other pairs."""
    text = texts.file(train.folder).read_text()
    texts.tokenizer(train.folder / "tokenizer.json", text)
    run = (texts.config(train.folder), f"data.tokenizer={train.folder / 'tokenizer.json'}", "steps=4", "evaluate.every=2")
    assert train.run(*run, "--stop-at", "2").code == 75
    texts.tokenizer(train.folder / "tokenizer.json", text, min_frequency=40)
    finished = train.run(*run)
    assert finished.code != 0 and re.search(r"tokenizer: [0-9a-f]{16} -> [0-9a-f]{16}", finished.output), finished.output
    texts.tokenizer(train.folder / "tokenizer.json", text)
    assert train.run(*run).code == 0
    assert left.summary(train)["metrics"]["validation/perplexity"] == pytest.approx(
        math.exp(left.summary(train)["metrics"]["validation/loss"])
    )


def test_keys_of_text_mean_nothing_to_pictures(train: Runner) -> None:
    finished = train.run(str(ROOT / "configs" / "digits.yaml"), "data.context=64")
    assert finished.code == 2
    assert "command line: data.context: means nothing to task image_classification; remove it" in finished.output


def test_a_gpt_learns_shakespeare(train: Runner, shared_data: Path) -> None:
    """In sixty steps from the 8 bits of a guess to less than those of single letters (4.8 in English)."""
    settings = ("model={name: gpt, depth: 2, width: 64, heads: 4}", "steps=60", "schedule={name: constant, warmup: 0}")
    finished = train.run(
        str(ROOT / "configs" / "shakespeare.yaml"), f"data.path={shared_data / 'tinyshakespeare'}", *settings, "evaluate.every=0"
    )
    assert finished.code == 0, finished.output
    losses = [line["train/loss"] for line in left.lines(train)]
    assert losses[-1] / math.log(2) < 4.8
