"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests import made
from tests.conftest import Runner
from train import cli
from train.doctor.cards import published

pytestmark = pytest.mark.gpu


def test_the_default_run_learns_on_a_gpu_and_gives_the_same_bits_again(train: Runner) -> None:
    hashes = []
    for name in ("first", "second"):
        finished = train.run(f"run.name={name}", "parallel.device=cuda")
        assert finished.code == 0, finished.output
        assert "device: cuda" in finished.output
        [path] = train.outputs.glob(f"{name}-*/summary.json")
        facts = json.loads(path.read_text())
        assert facts["metrics"]["validation/accuracy"] >= 0.97
        hashes.append(facts["weights_sha256"])
    assert hashes[0] == hashes[1]


def test_data_parallel_on_one_device_is_the_run_without_it(train: Runner) -> None:
    settings = ("parallel.device=cuda", "steps=5", "evaluate.every=0")
    for mode in ("single", "data_parallel"):
        finished = train.run(f"run.name={mode}", f"parallel.mode={mode}", *settings)
        assert finished.code == 0, finished.output
    [[one], [other]] = [list(train.outputs.glob(f"{mode}-*/model/model.safetensors")) for mode in ("single", "data_parallel")]
    weights, others = load_file(one), load_file(other)
    assert list(weights) == list(others)
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=1e-5, atol=1e-6)


def test_a_step_too_large_for_the_card_says_what_it_held_and_a_number_of_lanes_that_fits(train: Runner) -> None:
    made.shards(train.folder / "set", [13])
    gib = 0.3 * torch.cuda.mem_get_info()[0] / 2**30  # a sample: four are too many
    model = f"model={{name: 'tests.spies_failure:Hungry', gib: {gib}}}"
    settings = (made.config(train.folder), model, "steps=2", "batch.lanes=2", "parallel.device=cuda")
    finished = train.run(*settings)
    assert finished.code == 1 and "Traceback" not in finished.output
    assert "error: out of memory in step 1" in finished.output and "cuda:0 held 0.0" in finished.output
    assert "Set batch.lanes=4 in place of 2" in finished.output
    assert train.run(*settings, "batch.lanes=4").code == 0


def test_the_doctor_measures_the_gpu_beside_its_published_figures() -> None:
    examined = CliRunner().invoke(cli.main, ["doctor", "--json"])
    report = json.loads(examined.stdout)
    subjects = {finding["subject"]: finding for findings in report.values() for finding in findings}
    assert subjects["driver"]["state"] == "ok", subjects["driver"]
    assert subjects["GPU 0"]["found"].startswith(torch.cuda.get_device_name(0))
    for measured in ("copy", "fp32", "fp16", "from host"):
        assert subjects[f"GPU 0 {measured}"]["found"][0].isdigit()
    if published(torch.cuda.get_device_name(0)):
        assert "published" in subjects["GPU 0 copy"]["found"]


def test_a_plan_is_what_a_step_takes_on_the_gpu_and_fits_into_what_is_left() -> None:
    model = ("model={name: torchvision/resnet50}", "data.image={mode: RGB, mean: [0.5], std: [0.5]}")
    size = ("data.transforms.train=[{Resize: {size: 224}}]", "data.transforms.validation=[{Resize: {size: 224}}]")
    words = ["plan", *model, *size, "batch.size=64", "batch.lanes=2", "--devices", "1", "--json"]
    planned = CliRunner().invoke(cli.main, words)
    assert planned.exit_code == 0, planned.stderr
    report = json.loads(planned.stdout)
    [alone], timing = report["modes"], report["timing"]
    assert timing["micro_batch"] == 32
    assert alone["peak"] == pytest.approx(timing["peak"], rel=0.1)

    share = 0.6 * timing["peak"] / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        tight = CliRunner().invoke(cli.main, words)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert tight.exit_code == 0, tight.stderr
    assert json.loads(tight.stdout)["timing"]["micro_batch"] < 32


@pytest.mark.parametrize("optimizer", ["AdamW", "torchao/AdamW8bit"])
def test_optimizer_state_in_the_host_s_memory_leaves_the_bits(train: Runner, optimizer: str) -> None:
    settings = (f"optimizer={{name: {optimizer}, lr: 1e-3}}", "parallel.device=cuda", "steps=6", "evaluate.every=0")
    hashes = set()
    for place in ("off", "optimizer"):
        assert train.run(f"run.name={place}", f"speed.offload={place}", *settings, "--stop-at", "3").code == 75
        assert train.run(f"run.name={place}", f"speed.offload={place}", *settings).code == 0
        [path] = train.outputs.glob(f"{place}-*/summary.json")
        hashes.add(json.loads(path.read_text())["weights_sha256"])
    assert len(hashes) == 1
