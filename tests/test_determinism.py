"""Strict runs use the kernels and the number of threads that give the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import ROOT, Runner
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


@pytest.mark.parametrize("environment", [{"ACCELERATE_DYNAMO_BACKEND": "EAGER"}])
def test_a_compiled_model_is_summed_in_lanes_too(tmp_path: Path, environment: dict[str, str]) -> None:
    found = set()
    for processes, variables in ((1, {}), (1, environment), (2, environment)):
        train = Runner(tmp_path / f"{processes}{len(variables)}", environment=variables)
        made.shards(train.folder / "set", [13, 11])
        finished = train.run(made.config(train.folder), "model={name: cifar_cnn, width: 2}", "steps=3", processes=processes)
        assert finished.code == 0, finished.output
        assert ("compiled by eager" in finished.output) == bool(variables)
        found.add(left.weights(train))
    assert len(found) == 1


def test_an_accumulation_that_accelerate_would_divide_by_is_refused(train: Runner) -> None:
    made.shards(train.folder / "set", [13, 11])
    train.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    finished = train.run(made.config(train.folder), "steps=3")
    assert finished.code == 2 and "batch.lanes" in finished.output, finished.output
    assert not train.outputs.exists()


def test_decoding_has_one_thread_also_where_the_trainer_decodes(tmp_path: Path) -> None:
    """The sum of a large picture has other bits with two threads."""
    found = set()
    for workers in (0, 1):
        train = Runner(tmp_path / str(workers))
        made.shards(train.folder / "set", [13, 11])
        settings = ("run.threads=2", f"data.workers={workers}", "steps=2", "model={name: cifar_cnn, width: 2}")
        finished = train.run(made.config(train.folder), *settings, "data.transforms.train=['tests.spies:Spread']")
        assert finished.code == 0, finished.output
        found.add(left.weights(train))
    assert len(found) == 1


def test_what_a_step_frees_stays_for_the_next_and_is_asked_for_in_huge_pages(tmp_path: Path) -> None:
    """What goes back to the system after each step is given anew page by page; no count of faults tells it, since that depends
    on how torn the system's memory is."""
    steps = """
import torch
from pathlib import Path
from train import determinism
from train.run import read_settings
config, _ = read_settings([])
determinism.prepare_environment(config.run)
def resident():
    return int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0])
def advised():
    return sum("hg" in line.split() for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith("VmFlags:"))
before = resident(), advised()
for step in range(5):
    activations = [torch.ones(2**22) for _ in range(3)]
    del activations
print(resident() - before[0], advised() - before[1])
"""
    measured = subprocess.run([sys.executable, "-c", steps], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, advised = map(int, measured.stdout.split())
    assert kept > 46 * 1024  # KiB, of the 48 MiB of a step
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert advised
