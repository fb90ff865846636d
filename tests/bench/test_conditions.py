"""What a measurement says of the machine."""

from __future__ import annotations

from train.bench.conditions import links


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
