"""What a measurement depends on beside the configuration: devices, what links them, software, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

# What `nvidia-smi topo -m` calls the ways between two GPUs, in its legend's words.
_LINKS = {
    "NV": "NVLink",
    "PIX": "PCIe, one bridge",
    "PXB": "PCIe, several bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe and the links within a NUMA node",
    "SYS": "PCIe and the link between CPU sockets",
}


def conditions(gpus: Sequence[str]) -> dict[str, str]:
    """Facts for people, by what they are about. `gpus` are the ids of those that are used; none means the CPU."""
    cores = f"{cpu()}, {len(os.sched_getaffinity(0))} cores usable"
    names = sorted({torch.cuda.get_device_name(number) for number in range(len(gpus))})
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchvision", "accelerate"))
    return {
        "devices": f"{len(gpus)} x {' and '.join(names)}; CPU: {cores}" if gpus else cores,
        "interconnect": _interconnect(gpus),
        "software": f"Python {platform.python_version()}, {packages}" + (f", CUDA {torch.version.cuda}" if gpus else ""),
    }


def _interconnect(gpus: Sequence[str]) -> str:
    if len(gpus) == 1:
        return "none"
    if not gpus:
        return "gloo over this machine's loopback"
    try:
        matrix = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        matrix = ""
    return links(matrix, gpus) or "unknown: nvidia-smi does not tell"


def links(matrix: str, gpus: Sequence[str]) -> str:
    """The kinds of links among some GPUs, from the matrix that `nvidia-smi topo -m` prints."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    cells = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row}
    places = [int(gpu) for gpu in gpus if f"GPU{gpu}" in cells]
    kinds = sorted({cells[f"GPU{one}"][other] for one in places for other in places if one != other})
    return " and ".join(f"{kind} ({_LINKS.get(kind.rstrip('0123456789'), '?')})" for kind in kinds)


def cpu() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()
