"""The time in communication, from traces whose times are known, and from a run whose second process is known to be late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import made
from tests.conftest import Runner
from train.bench.conditions import links
from train.bench.traces import Communication, of_trace, read


def event(name: str, start: float, end: float, kind: str = "cpu_op", tid: int = 1, pid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": tid, "pid": pid}


STEPS = [event("ProfilerStep#4", 100, 150, "user_annotation"), event("ProfilerStep#5", 150, 200, "user_annotation")]


def test_on_the_cpu_gloo_communicates_and_its_own_copies_compute_nothing() -> None:
    events = [
        *STEPS,
        event("gloo:all_to_all", 90, 120, "user_annotation", tid=2),  # 20 within the steps
        event("aten::copy_", 95, 119, tid=2),
        event("gloo:all_gather", 130, 150, "user_annotation", tid=3),
        event("gloo:all_gather", 140, 160, "user_annotation", tid=2),  # 10 more beside the other thread's
        event("aten::convolution_backward", 105, 135),
        event("aten::mm", 106, 134),  # within it
        event("c10d::allgather_", 155, 156),
    ]
    assert of_trace(events) == [Communication(share=0.5, exposed=0.3)]  # not beside computing: 100 to 105 and 135 to 160


def test_on_gpus_the_kernels_count_each_device_by_itself() -> None:
    nccl = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        *STEPS,
        event("gloo:all_gather", 100, 200, "user_annotation", tid=2),  # of words, which no GPU waits for
        event(nccl, 120, 160, "kernel", tid=20, pid=0),
        event("sm90_xmma_gemm", 100, 150, "kernel", pid=0),
        event("Memcpy PtoP (Device -> Device)", 100, 110, "gpu_memcpy", pid=1),
        event("Memcpy HtoD (Pageable -> Device)", 105, 120, "gpu_memcpy", pid=1),
    ]
    assert of_trace(events) == [Communication(0.4, 0.1), Communication(0.1, 0.05)]


def test_the_mean_is_over_all_processes(tmp_path: Path) -> None:
    for rank, end in enumerate((120, 160)):
        trace = [*STEPS, event("gloo:all_to_all", 100, end, "user_annotation", tid=2)]
        (tmp_path / f"{rank}.json").write_text(json.dumps({"traceEvents": trace}))
    assert read(sorted(tmp_path.iterdir())).share == pytest.approx(0.4)


def test_the_last_steps_of_a_run_are_traced_with_the_threads_that_communicate(train: Runner) -> None:
    made.shards(train.folder / "set", [13])
    settings = (made.config(train.folder), "steps=6", "tracking.trace=2")
    finished = train.run(*settings, processes=2)
    assert finished.code == 0, finished.output
    traces = sorted(train.outputs.glob("*/trace-*.json"))
    assert [path.name for path in traces] == ["trace-0.json", "trace-1.json"]
    for path in traces:
        names = [one["name"] for one in json.loads(path.read_text())["traceEvents"] if one.get("ph") == "X"]
        assert [name for name in names if name.startswith("ProfilerStep#")] == ["ProfilerStep#4", "ProfilerStep#5"]
        # The gradients' way over the processes: one bucket a step here, sent by a thread of its own.
        assert names.count("c10d::alltoall_base_") == names.count("gloo:all_to_all") > 0
    assert 0 < read(traces).exposed <= read(traces).share < 1


def test_the_links_of_the_gpus_in_use_are_named() -> None:
    matrix = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tNODE\t0-63\t0
GPU1\tNV18\t X \tPHB\tPIX\t0-63\t0
GPU2\tSYS\tPHB\t X \tSYS\t64-127\t1
NIC0\tNODE\tPIX\tSYS\t X \t\t

Legend:

  X    = Self
"""
    assert links(matrix, ["0", "1"]) == "NV18 (NVLink)"
    assert links(matrix, ["1", "2"]) == "PHB (PCIe through the CPU)"
    assert links("", ["0", "1"]) == ""
