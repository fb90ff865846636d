"""Strict runs use the kernels and the number of threads that give the same bits."""

from __future__ import annotations

from pathlib import Path

from tests import made
from tests.conftest import Runner
from tests.spied import Spied, spied


def run(folder: Path, *settings: str, processes: int = 1, **environment: str) -> Spied:
    train = Runner(folder, environment)
    made.shards(train.folder / "set", [16])
    return spied(train, made.config(train.folder), "steps=2", "batch.lanes=2", *settings, processes=processes)


def test_threads_are_a_setting_of_the_run_and_not_of_the_machine(tmp_path: Path) -> None:
    """With a model for which the number of threads does change the bits."""
    wide = "model={name: 'tests.spies:Wide'}"
    weights = {
        run(tmp_path / "1", wide).weights,
        run(tmp_path / "2", wide, processes=2).weights,
        run(tmp_path / "omp", wide, OMP_NUM_THREADS="2").weights,
    }
    assert len(weights) == 1
    assert run(tmp_path / "two", wide, "run.threads=2").weights not in weights


def test_an_operation_that_has_no_deterministic_form_is_refused_unless_bits_do_not_matter(tmp_path: Path) -> None:
    train = Runner(tmp_path)
    made.shards(train.folder / "set", [16])
    settings = (made.config(train.folder), "steps=1", "model={name: 'tests.spies:Unsteady'}")
    strict = train.run(*settings)
    assert strict.code != 0
    assert "does not have a deterministic implementation" in strict.output
    assert train.run(*settings, "run.determinism=fast").code == 0
