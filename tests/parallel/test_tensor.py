"""Layers cut over processes: the losses are one process's to 1e-6, and what does not fit is refused with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import ROOT, Runner

TENSOR = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
MODEL = ("model={name: 'tests.parallel.nets:mlp'}", "optimizer={name: SGD, lr: 0.05, momentum: 0.9, clip_norm: 0.5}")
CUT = "parallel.tensor={'1': columns, '3': rows}"


def runner(folder: Path, environment: dict[str, str]) -> Runner:
    if not (folder / "set").exists():
        made.shards(folder / "set", [12, 9])
        made.shards(folder / "set", [7], "validation")
    return Runner(folder, environment)


def test_the_losses_are_those_of_one_process_and_a_checkpoint_goes_either_way(tmp_path: Path) -> None:
    run = (
        str(ROOT / "configs" / "digits.yaml"),
        "epochs=",
        "schedule={name: constant}",
        *MODEL,
        "ema.decay=0.9",
        "checkpoint.every=2",
        "evaluate.every=2",
        "tracking.every=1",
    )
    losses = {}
    for name, parts in {"one": [(1, 6)], "cut": [(2, 6)], "there and back": [(2, 2), (1, 4), (2, 6)]}.items():
        for processes, steps in parts:
            train = Runner(tmp_path / name, TENSOR if processes == 2 else {})
            train.folder.mkdir(exist_ok=True)
            cut = (CUT,) if processes == 2 else ()
            finished = train.run(*run, f"steps={steps}", *cut, processes=processes)
            assert finished.code == 0, finished.output
            assert f"mode: {'tensor' if processes == 2 else 'single'}, " in finished.output
        lines = left.lines(train)
        losses[name] = [value for line in lines for key, value in line.items() if key.endswith("/loss")]
        assert len(losses[name]) == 6 + 3
        assert len(left.tensors(train)) == 11  # whole and under the plain model's names
    assert losses["cut"] == pytest.approx(losses["one"], rel=1e-6)
    assert losses["there and back"] == pytest.approx(losses["one"], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((CUT, "model.width=9"), ["1 has 9 outputs, which 2 processes cannot share", "3 has 9 inputs, which 2 processes"]),
        ((), ["parallel.tensor: which layers are cut is missing"]),
        (("parallel.tensor={'1': columns, '4': rows}",), ["4 is a BatchNorm1d; only Linear layers are cut"]),
        (("parallel.tensor={fc: rows}",), ["parallel.tensor: the model has no module fc (its parts: 0, 1, 2"]),
        (("parallel.tensor={'1': columns}",), ["the layers do not fit each other", "cut that by rows"]),
        (("parallel.tensor={'1': colums}",), ["columns", "rows", "colums"]),
        (
            ("parallel.tensor={'1': columns, '3': rows, '5': columns}", "data.classes=4"),
            ["the model's output is one process's part"],
        ),
        ((CUT, "optimizer.fused=true"), ["optimizer.fused: true is not possible"]),
        ((CUT, "parallel.pipeline={stages: 2, split_at: ['3']}"), ["cannot be joined with FSDP or tensor parallelism"]),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_first_step(tmp_path: Path, settings: tuple[str, ...], words: list[str]) -> None:
    train = runner(tmp_path, TENSOR)
    finished = train.run(made.config(tmp_path), *MODEL, "steps=2", *settings, processes=2)
    assert finished.code == 2, finished.output
    for word in words:
        assert word in finished.output, finished.output
    assert "Traceback" not in finished.output


def test_layers_to_cut_without_a_tp_size_are_refused(tmp_path: Path) -> None:
    train = runner(tmp_path, {})
    finished = train.run(made.config(tmp_path), *MODEL, "steps=2", CUT)
    assert finished.code == 2
    assert "says none (configs/accelerate/tensor_parallel.yaml)" in finished.output
