"""What NVIDIA's data sheets say of its cards: dense rates of the tensor cores, without sparsity, at the boost clock."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """Memory in GB/s; products in TFLOP/s, of fp16 with fp32 sums; None where the card does not have it."""

    memory: float
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float


# By the name that the driver gives.
_CARDS = {
    "NVIDIA B200": Card(8000, 75, 1125, 2250, 2250),
    "NVIDIA H200": Card(4800, 67, 494, 989, 989),
    "NVIDIA H100 80GB HBM3": Card(3350, 67, 494, 989, 989),
    "NVIDIA H100 NVL": Card(3900, 60, 417, 835, 835),
    "NVIDIA H100 PCIe": Card(2000, 51, 378, 756, 756),
    "NVIDIA A100-SXM4-80GB": Card(2039, 19.5, 156, 312, 312),
    "NVIDIA A100-SXM4-40GB": Card(1555, 19.5, 156, 312, 312),
    "NVIDIA A100 80GB PCIe": Card(1935, 19.5, 156, 312, 312),
    "NVIDIA A100-PCIE-40GB": Card(1555, 19.5, 156, 312, 312),
    "NVIDIA L40S": Card(864, 91.6, 183, 362, 362),
    "NVIDIA L4": Card(300, 30.3, 60, 121, 121),
    "NVIDIA A10": Card(600, 31.2, 62.5, 125, 125),
    "NVIDIA A10G": Card(600, 31.5, 35, 70, 70),
    "NVIDIA RTX 6000 Ada Generation": Card(960, 91.1, 182, 364, 364),
    "NVIDIA RTX A6000": Card(768, 38.7, 77.4, 155, 155),
    "NVIDIA GeForce RTX 5090": Card(1792, 104.8, 104.8, 209.5, 209.5),
    "NVIDIA GeForce RTX 4090": Card(1008, 82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": Card(936, 35.6, 35.6, 71, 71),
    "Tesla T4": Card(320, 8.1, None, None, 65),
}


def published(name: str) -> Card | None:
    """The figures of a card, None for one that is not in the table."""
    return _CARDS.get(name)
