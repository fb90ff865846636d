"""`train plan` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from click.testing import CliRunner, Result
from torch import Tensor, nn

from tests import made
from tests.plan.measured import accelerator, config
from tests.plan.nets import NextToken, sentences, small
from train import cli
from train.parallel.launch import Launch
from train.plan.timing import largest_that_runs


def plan(*words: str) -> Result:
    AcceleratorState._reset_state(True)  # a process has one precision
    return CliRunner().invoke(cli.main, ["plan", *words])


def facts(*words: str) -> dict[str, Any]:
    """All numbers, of the digits unless the words name another configuration."""
    result = plan(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def modes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found["modes"]}


def test_each_mode_keeps_its_share_of_weights_sums_and_state() -> None:
    found = facts("--memory", "1", "--devices", "2", "batch.lanes=8", "ema.decay=0.9")
    one, ddp, fsdp, copies = modes(found).values()
    weights = 4 * found["parameters"]
    assert found["parameters"] == 67_946
    assert weights <= one["needs"]["weights"] < 1.01 * weights  # and BatchNorm's statistics
    assert one["needs"]["averaged weights"] == one["needs"]["weights"]
    assert 2 * weights <= one["needs"]["optimizer state"] < 2.01 * weights  # AdamW's two moments, and its counts
    # 8 lanes on one process keep three sums; 4 of 8 on each of two keep two.
    assert [mode["needs"].get("partial sums", 0) for mode in (one, ddp, copies)] == [3 * weights, 2 * weights, 3 * weights]
    assert fsdp["needs"]["partial sums"] == weights
    for kind in ("weights", "optimizer state", "averaged weights"):
        assert fsdp["needs"][kind] == pytest.approx(one["needs"][kind] / 2, abs=1)
        assert ddp["needs"][kind] == one["needs"][kind]
    assert all(mode["peak"] == sum(mode["needs"].values()) and mode["fits"] for mode in (one, ddp, fsdp, copies))
    command = "accelerate launch --multi_gpu --num_processes 2 train/main.py batch.lanes=8 ema.decay=0.9"
    assert found["advice"] == [f"take: ddp:2: {command}"]


def test_the_lanes_that_make_a_run_fit_are_named(tmp_path: Path) -> None:
    settings = ("batch.size=4096", "batch.lanes=2")
    tight = 0.05
    short = facts(*settings, "--memory", str(tight))
    [one] = short["modes"]
    assert not one["fits"] and one["fewest_lanes"] > 2
    assert short["advice"][0].startswith(f"take: single with batch.lanes={one['fewest_lanes']}, that is ")
    assert short["advice"][0].endswith(f"train/main.py batch.size=4096 batch.lanes={one['fewest_lanes']}")
    for lanes, fits in ((one["fewest_lanes"], True), (one["fewest_lanes"] // 2, False)):
        [other] = facts("batch.size=4096", f"batch.lanes={lanes}", "--memory", str(tight))["modes"]
        assert other["fits"] is fits
        assert (other["largest_micro_batch"] >= 4096 // lanes) is fits
    nothing = facts(*settings, "--memory", "0.0001")
    assert nothing["advice"][0].startswith("take: none fits")


def test_a_cpu_is_timed_and_the_whole_run_is_priced() -> None:
    found = facts("--price", "3", "epochs=100")
    one, ddp = modes(found)["single"], modes(found)["ddp:2"]
    timing = found["timing"]
    step = 4 * timing["lane"] + timing["update"]
    assert one["samples_per_second"] == pytest.approx(64 / step)
    assert ddp["samples_per_second"] == pytest.approx(64 / (2 * timing["lane"] + timing["update"]))
    assert found["steps"] == -(-100 * 1437 // 64)
    assert one["hours"] == pytest.approx(found["steps"] * step / 3600)
    assert (one["cost"], ddp["cost"]) == (pytest.approx(3 * one["hours"]), pytest.approx(2 * 3 * ddp["hours"]))
    assert 20 < one["samples_per_second"] < 1e6


def test_the_table_has_a_column_a_mode_and_says_why_one_cannot_be() -> None:
    result = plan("--quick", "batch.size=60", "batch.lanes=6", "--devices", "4", "--memory", "2")
    assert result.exit_code == 0, result.stderr
    assert "tracing a step" in result.stderr and "tracing" not in result.stdout
    rows = {line[:22].strip(): line[22:].split() for line in result.stdout.splitlines() if line.startswith("  ")}
    assert rows["lanes a step"][:3] == ["6", "x", "10"]
    assert rows["fits"] == ["yes", "cannot", "be", "cannot", "be", "yes"]
    assert "ddp:4: batch.lanes: 6 lanes cannot be shared by 4 processes" in result.stdout
    assert "take: single: accelerate launch train/main.py batch.size=60 batch.lanes=6\n" in result.stdout


def test_what_is_to_be_taken_is_a_command_of_the_same_run() -> None:
    [taken] = facts("--memory", "1", "--precision", "bf16", "optimizer={name: SGD, lr: 0.1}")["advice"]
    assert taken == "take: single: accelerate launch --mixed_precision bf16 train/main.py 'optimizer={name: SGD, lr: 0.1}'"


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_of_a_few_samples_are_planned_too(lanes: int) -> None:
    """Their feature maps end in one pixel, so that one sample has no statistics."""
    words = ("--memory", "8", "model.name=torchvision/resnet18", f"batch={{size: 4, lanes: {lanes}}}")
    [one] = facts(*words, "data.image={mode: RGB, mean: [0.5], std: [0.5]}")["modes"]
    assert one["fits"] and one["micro_batch"] == 4 // lanes


def test_seeds_are_planned_as_one_run_and_that_is_said() -> None:
    told = "seeds: all numbers are of one run; 3 at the same time take at most 3 times the memory"
    for seeds, expected in (("[0,1,2]", True), ("[]", False)):
        assert (told in " ".join(plan(f"seeds={seeds}", "--quick").stdout.split())) == expected


def test_a_pipeline_is_planned_by_its_fullest_stage() -> None:
    """The second one has more weights here, and one lane's activations under 1F1B, but those of all lanes under gpipe."""
    words = ("--memory", "1", "--devices", "2", "batch.lanes=8")
    cut = "parallel.pipeline={{stages: 2, split_at: [{}], schedule: {}}}"
    one_by_one, all_at_once = (modes(facts(*words, cut.format("4", order))) for order in ("1f1b", "gpipe"))
    alone, first, second = one_by_one["single"], one_by_one["pipeline:2"], all_at_once["pipeline:2"]
    assert first["fits"] and first["fullest_stage"] in (1, 2) and alone["fullest_stage"] is None
    assert first["needs"]["weights"] < alone["needs"]["weights"]
    assert first["peak"] < second["peak"]
    assert first["fewest_lanes"] == 2  # fewer would leave a stage without one
    [wrong] = [mode for name, mode in modes(facts(*words, cut.format("blocks", "1f1b"))).items() if name == "pipeline:2"]
    assert "parallel.pipeline.split_at: the model has no module blocks" in wrong["problem"]


def test_a_configuration_that_is_wrong_is_told_as_a_run_tells_it() -> None:
    result = plan("configs/digits.yaml", "model.depth=3")
    assert result.exit_code == 2
    assert "model.depth" in result.stderr and "Traceback" not in result.stderr


class OnlyFew(nn.Module):
    """On a device whose memory ends at four samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small()

    def forward(self, tokens: Tensor) -> Tensor:
        if len(tokens) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.gpt(tokens)


def test_lanes_are_halved_until_a_step_runs() -> None:
    tried: list[str] = []
    chosen = config("batch.size=48", "batch.lanes=3")
    timing = largest_that_runs(OnlyFew, NextToken(), sentences(1), accelerator(), chosen, Launch(), 16, tried.append)
    assert timing.micro_batch == 4
    assert [text.split(" steps of ")[1] for text in tried] == [f"{lanes} samples ..." for lanes in ("3 x 16", "6 x 8", "12 x 4")]


def test_state_in_the_host_s_memory_is_planned_there() -> None:
    words = ("--memory", "1", "--devices", "2", "optimizer={name: AdamW, lr: 1e-3}")
    plain, away = facts(*words), facts(*words, "speed.offload=optimizer")
    weights = 4 * plain["parameters"]
    assert (plain["host"], away["host"]) == (0, 2 * weights)
    one, other = modes(plain)["single"], modes(away)["single"]
    assert one["peak"] - other["peak"] == 2 * weights  # the passes take most here, in which none of it is on the device
    assert "speed.offload: is not possible in mode fsdp" in modes(away)["fsdp:2"]["problem"]
    assert "host: each process keeps 0.5 MiB of optimizer state" in plan(*words, "speed.offload=optimizer").stdout


def test_a_switch_that_is_not_for_this_device_is_told_in_place_of_advice() -> None:
    found = plan("speed.offload=optimizer", "--quick").stdout
    assert "single: speed.offload: the state of an optimizer on the CPU is in the host's memory already" in found
    assert "take: nothing, before what is said above is mended" in found


def test_eight_bits_are_planned_with_a_quarter_of_the_state() -> None:
    """Of the larger weights: the smaller ones, and those that are no whole number of blocks, keep four bytes a value."""
    pytest.importorskip("torchao")
    [whole], [few] = (
        facts("--memory", "1", f"optimizer={{name: {name}, lr: 1e-3}}")["modes"] for name in ("AdamW", "torchao/AdamW8bit")
    )
    assert 0.25 < few["needs"]["optimizer state"] / whole["needs"]["optimizer state"] < 0.4


def test_a_model_that_needs_its_values_is_told(tmp_path: Path) -> None:
    made.shards(tmp_path / "set", [4])
    result = plan(made.config(tmp_path), "steps=1", "model={name: tests.parallel.nets:Branching}", "--quick")
    assert result.exit_code == 1
    assert "error: the memory cannot be forecast, since the model or its optimizer needs the values of tensors" in result.stderr


def test_a_language_model_is_planned_from_its_configuration(shared_data: Path) -> None:
    """GPT-2 keeps AdamW's two moments of each weight, and the tied head is no weight of its own."""
    settings = ("configs/shakespeare.yaml", f"data.path={shared_data / 'tinyshakespeare'}", "data.context=1024")
    found = facts(
        *settings, "model={depth: 12, width: 768, heads: 12}", "batch={size: 4, lanes: 2}", "--memory", "24", "--devices", "2"
    )
    weights = 4 * found["parameters"]
    assert found["parameters"] == 124_439_808 - (50_257 - 256) * 768  # of bytes
    one = modes(found)["single"]
    assert one["needs"]["weights"] == weights
    assert one["needs"]["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert one["fits"] and one["needs"]["activations"] > weights / 2
