"""What the time of a step goes into, from traces whose times are known, and from the profile of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import left, made
from tests.conftest import Runner
from train.profiling.traces import Communication, events, of_trace, parts, read, step_count


def event(name: str, start: float, end: float, kind: str = "cpu_op", tid: int = 1, pid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": tid, "pid": pid}


STEPS = [event("ProfilerStep#4", 100, 150, "user_annotation"), event("ProfilerStep#5", 150, 200, "user_annotation")]


def test_on_the_cpu_gloo_communicates_and_its_own_copies_compute_nothing() -> None:
    spans = [
        *STEPS,
        event("gloo:all_to_all", 90, 120, "user_annotation", tid=2),  # 20 within the steps
        event("aten::copy_", 95, 119, tid=2),
        event("gloo:all_gather", 130, 150, "user_annotation", tid=3),
        event("gloo:all_gather", 140, 160, "user_annotation", tid=2),  # 10 more beside the other thread's
        event("aten::convolution_backward", 105, 135),
        event("aten::mm", 106, 134),  # within it
        event("c10d::allgather_", 155, 156),
    ]
    assert of_trace(spans) == [Communication(share=0.5, exposed=0.3)]  # not beside computing: 100 to 105 and 135 to 160


def test_on_gpus_the_kernels_count_each_device_by_itself() -> None:
    nccl = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    spans = [
        *STEPS,
        event("gloo:all_gather", 100, 200, "user_annotation", tid=2),  # of words, which no GPU waits for
        event(nccl, 120, 160, "kernel", tid=20, pid=0),
        event("sm90_xmma_gemm", 100, 150, "kernel", pid=0),
        event("Memcpy PtoP (Device -> Device)", 100, 110, "gpu_memcpy", pid=1),
        event("Memcpy HtoD (Pageable -> Device)", 105, 120, "gpu_memcpy", pid=1),
    ]
    assert of_trace(spans) == [Communication(0.4, 0.1), Communication(0.1, 0.05)]


def test_the_mean_is_over_all_processes(tmp_path: Path) -> None:
    for rank, end in enumerate((120, 160)):
        trace = [*STEPS, event("gloo:all_to_all", 100, end, "user_annotation", tid=2)]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"traceEvents": trace}))
    assert read(sorted(tmp_path.iterdir())).share == pytest.approx(0.4)


def label(part: str, start: float, end: float) -> dict[str, Any]:
    return event(f"step: {part}", start, end, "user_annotation")


def test_the_parts_of_a_step_on_the_cpu_are_those_that_the_process_is_at_unless_it_only_communicates() -> None:
    spans = [
        *STEPS,
        label("input wait", 100, 110),
        label("forward", 110, 130),
        event("aten::mm", 112, 128),
        label("backward", 130, 160),
        event("aten::mm_backward", 130, 150),
        event("gloo:all_to_all", 140, 158, "user_annotation", tid=2),  # from 150 on alone
        label("evaluation", 160, 190),
        label("saving", 180, 190),  # within it
        label("forward", 300, 400),  # after the steps
    ]
    found = {"forward": 20, "backward": 22, "input wait": 10, "saving": 10, "evaluation": 20, "communication": 8, "other": 10}
    assert parts(spans) == {name: time / 2 for name, time in found.items()}
    assert step_count(spans) == 2


def test_the_parts_of_a_step_on_a_gpu_are_those_that_have_launched_its_kernels() -> None:
    def kernel(name: str, launched: float, start: float, end: float) -> list[dict[str, Any]]:
        launch = event("cudaLaunchKernel", launched, launched + 1, "cuda_runtime", tid=3)
        launch["args"] = {"correlation": launched}
        return [launch, event(name, start, end, "kernel", pid=0) | {"args": {"correlation": launched}}]

    spans = [
        *STEPS,
        label("input wait", 100, 104),
        label("forward", 104, 110),
        label("backward", 110, 116),
        label("optimizer", 116, 180),  # waits for the GPU
        *kernel("gemm", 105, 110, 130),
        *kernel("gemm", 112, 130, 170),
        *kernel("ncclDevKernel_AllReduce", 113, 160, 175),
        *kernel("adamw", 117, 176, 180),
    ]
    # The GPU is idle from 100 to 110 and from 175 to 176.
    found = {"input wait": 4, "forward": 6 + 20, "backward": 40, "communication": 5, "optimizer": 1 + 4, "other": 20}
    assert parts(spans) == {name: time / 2 for name, time in found.items()}


def test_a_profile_traces_its_steps_in_all_processes_and_changes_no_bit(train: Runner) -> None:
    made.shards(train.folder / "set", [13])
    settings = (made.config(train.folder), "steps=6")
    finished = train.run(*settings, processes=2)
    assert finished.code == 0, finished.output
    plain = left.weights(train)
    finished = train.run(*settings, "run.name=profiled", "--profile", "4..5", processes=2)
    assert finished.code == 0, finished.output
    traces = sorted(train.outputs.glob("*/trace-*.json"))
    assert [path.name for path in traces] == ["trace-0.json", "trace-1.json"]
    for path in traces:
        names = [one["name"] for one in events(path)]
        assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#3", "ProfilerStep#4"]  # from 0 on
        # The gradients' way over the processes: one bucket a step here, sent by a thread of its own.
        assert names.count("c10d::alltoall_base_") == names.count("gloo:all_to_all") > 0
        assert names.count("step: forward") == names.count("step: backward") == 2 * 2  # lanes of a process
        assert set(parts(events(path))) >= {"forward", "backward", "optimizer", "input wait", "logging", "communication"}
    assert 0 < read(traces).exposed <= read(traces).share < 1
    [folder] = train.outputs.glob("profiled-*")
    assert left.facts(folder)["weights_sha256"] == plain
    assert finished.output.count("profile of steps 4 to 5: ") == 1
    shown, _, _ = finished.output.partition("slowest operators")  # of which one may be called by a word alone
    shares = re.findall(r"^  (\w[\w ]*?) +[\d.]+ ms +([\d.]+)%$", shown, re.MULTILINE)
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.5)
    assert 1 <= len(re.findall(r"^  (?:aten|c10d)::\w+ x [\d.]+ ", finished.output, re.MULTILINE)) <= 8


def test_steps_that_cannot_be_profiled_are_refused_and_what_a_stop_cuts_off_is_told(train: Runner) -> None:
    made.shards(train.folder / "set", [13])
    settings = (made.config(train.folder), "steps=6")
    for steps in ("1..3", "5..7", "4..3"):
        finished = train.run(*settings, "--profile", steps)
        assert finished.code == 2
        assert f"--profile {steps}: give the first and the last step, of those from 2 to 6" in finished.output
    assert train.run(*settings, "--profile", "5").code == 2
    finished = train.run(*settings, "--profile", "4..6", "--stop-at", "5")
    assert finished.code == 75
    told = re.search(r"no profile of steps 4 to 6: the run has ended; (\S+) has those until then", finished.output)
    assert told and step_count(events(Path(told[1]))) >= 2
    finished = train.run(*settings, "--profile", "6..6")
    assert finished.code == 2 and "of those from 7 to 6: the run has 6 steps, 5 of them are done" in finished.output
