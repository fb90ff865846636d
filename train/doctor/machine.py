"""CPU, memory, disk, the folders that are written, and the container around them or beside them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from train.bench.conditions import cpu
from train.doctor.findings import Finding, broken, gibibytes, ok

_CGROUP = Path("/sys/fs/cgroup")
_SHARED_GIB = 1  # data workers hand batches over in shared memory, and Docker gives 64 MiB unless told
_DISK_GIB = 10


def machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    limit = _limit("cpu.max")
    quota = f", and this container's share of them is {limit[0] / limit[1]:.1f}" if limit and len(limit) == 2 else ""
    return [ok("CPU", f"{cpu()}, {cores} cores usable{quota}"), memory(), shared_memory()]


def memory() -> Finding:
    limit = _limit("memory.max")
    text = f"{gibibytes(_meminfo('MemAvailable'))} of {gibibytes(_meminfo('MemTotal'))} available"
    return ok("memory", text + (f", and this container may have {gibibytes(limit[0])}" if limit else ""))


def usable_memory() -> int:
    """Bytes that are free, of those that this container may have."""
    limit = _limit("memory.max")
    return min([_meminfo("MemAvailable"), *(limit or [])])


def _meminfo(key: str) -> int:
    """Bytes, as the kernel tells."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts[key].split()[0]) * 1024


def _limit(name: str) -> list[int] | None:
    """What the control group of this container allows (version 2 of Linux's interface); None for no limit."""
    try:
        return [int(word) for word in (_CGROUP / name).read_text().split()]
    except (OSError, ValueError):  # "max"
        return None


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.is_dir():
        return Finding("shared memory", "failed", f"there is no {folder}", "mount a tmpfs there")
    size = shutil.disk_usage(folder).total
    if size < _SHARED_GIB * 2**30:
        mend = "the processes of several GPUs need more (NCCL): docker run --shm-size 8g, or shm_size in the compose file"
        return Finding("shared memory", "warning", f"{folder} has {gibibytes(size)}", mend)
    return ok("shared memory", f"{folder} has {gibibytes(size)}")


def container() -> list[Finding]:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ:
        return [ok("container", "this is one")]
    if shutil.which("docker") is None:
        return [Finding("engine", "note", "no docker here", "only `docker compose run train` needs it; install Docker Engine")]
    if shutil.which("nvidia-ctk") or shutil.which("nvidia-container-runtime-hook"):
        return [ok("engine", "docker, with NVIDIA's container toolkit")]
    mend = "for GPUs in containers install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker"
    return [Finding("engine", "note", "docker, without NVIDIA's container toolkit", mend)]


def folders() -> list[Finding]:
    """Those that a run writes to: its results and the caches of the libraries."""
    from huggingface_hub.constants import HF_HOME
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    places = {"results": "outputs", "data cache": HF_HOME, "compiled kernels": compiled}
    return [folder(subject, Path(place)) for subject, place in places.items()] + [temporary()]


def temporary() -> Finding:
    try:
        return folder("temporary files", Path(tempfile.gettempdir()))
    except FileNotFoundError as error:
        return broken("temporary files", error, "mount a tmpfs on /tmp: docker run --tmpfs /tmp:exec")


def folder(subject: str, path: Path) -> Finding:
    """Whether a folder can be written, or made where it is missing, and the room that is left on its disk."""
    there = next(place for place in [path.absolute(), *path.absolute().parents] if os.access(place, os.F_OK))
    free = shutil.disk_usage(there).free
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        mend = f"make {there} a folder that uid {os.getuid()} may write; for a container set RUN_AS to its owner (id -u, id -g)"
        return Finding(subject, "failed", f"{path} cannot be written", mend)
    text = f"{path}, {gibibytes(free)} free"
    if free < _DISK_GIB * 2**30:
        return Finding(subject, "warning", text, "checkpoints and cached data may not fit: free some, or name another folder")
    return ok(subject, text)
