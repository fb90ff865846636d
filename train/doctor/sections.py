"""The parts of the examination in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable

from train.doctor.findings import Finding
from train.doctor.gpu import gpu
from train.doctor.machine import container, folders, machine
from train.doctor.software import software
from train.doctor.speed import speed

SECTIONS: dict[str, Callable[[], list[Finding]]] = {
    "GPU": gpu,
    "Machine": machine,
    "Container": container,
    "Folders": folders,
    "Software": software,
}

__all__ = ["SECTIONS", "speed"]
