"""What a run leaves behind: the progress line, metrics.jsonl, trackers, checkpoints, the final weights and the summary."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from train import tracking
from train.checkpoint import Snapshot
from train.data.loader import BadSample
from train.job import Job
from train.profiling.profiler import Profiler
from train.progress import Display, Progress
from train.receipt.recorder import Recorder
from train.run_folder import RunFolder
from train.saving import Saved
from train.weights import weights_sha256

if TYPE_CHECKING:
    from torch import Tensor


class Journal:
    """Keeps the times of every process; writes and shows those of the main one, which alone has a folder."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder | None,
        places: Mapping[str, str],
        snapshot: Snapshot | None,
        *,
        evaluated: int,
        seconds: float,
        profile: tuple[int, int] | None = None,
        display: Display | None = None,
    ) -> None:
        step = snapshot.step if snapshot else 0
        self.job, self.folder = job, folder
        self._began = self._interval_began = time.perf_counter()
        self._before = seconds
        self._interval_steps, self._waited = 0, 0.0
        path = job.config.folder / f"trace-{job.processes.rank}.json"
        self._profiler = Profiler(profile, path, step) if profile else None
        if folder:
            folder.write("config.yaml", job.config.to_yaml())
            tracking.rewind(folder.path / "metrics.jsonl", step or -1, evaluated or -1)
            self._metrics = tracking.Metrics(folder.path / "metrics.jsonl")
            self._progress = display or Progress(job.total_steps, step)
            self._recorder = Recorder(job, folder, places, snapshot)

    def start_trackers(self, trackers: tracking.Trackers, step: int, wandb_id: str | None) -> str | None:
        """Open them; returns the id of the W&B run."""
        config = self.job.config.model_dump(mode="json")
        return tracking.start(self.job.accelerator, trackers, config=config, wandb_id=wandb_id, step=step, say=self.say)

    @property
    def seconds(self) -> float:
        """Spent on this run so far, by all its starts up to their last checkpoints."""
        return self._before + time.perf_counter() - self._began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround the wait for data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Surround what is no part of a step, an evaluation or a save, to leave it out of the rates."""
        began = time.perf_counter()
        yield
        self._interval_began += time.perf_counter() - began

    def step(self, step: int) -> None:
        self._interval_steps += 1
        if self.folder:
            self._progress.update(step)

    def end_step(self) -> None:
        """After all of a step, its logging too."""
        if self._profiler:
            with self.pausing():
                if summary := self._profiler.step():
                    self._end_profile(summary)

    def _end_profile(self, summary: Sequence[str]) -> None:
        self._profiler = None
        for line in summary:
            self.say(line)

    def training(self, step: int, values: Mapping[str, float], shown: int) -> None:
        """The numbers of a step; the rates are those since the last call. `shown` is the digest of all samples until here."""
        elapsed = time.perf_counter() - self._interval_began
        values = {
            **values,
            "samples_per_second": self._interval_steps * self.job.config.batch.size / elapsed,
            "data_wait": self._waited / elapsed,
            "memory_gib": peak_memory(self.job.accelerator.device) / 2**30,
        }
        self._interval_began, self._interval_steps, self._waited = time.perf_counter(), 0, 0.0
        self._record(step, {f"train/{name}": value for name, value in values.items()})
        if self.folder:
            self._progress.update(step, values)
            self._recorder.step(step, values["loss"], values["grad_norm"], shown)

    def history(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the receipt."""
        return self._recorder.history() if self.folder else None

    def saved(self, checkpoint: Saved) -> None:
        """Enter a checkpoint into the receipt."""
        if self.folder:
            self._recorder.saved(checkpoint)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._record(step, metrics)
        self.say(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))

    def skipped(self, where: str, bad: BadSample) -> None:
        """Tell a sample that is left out; every process tells its own."""
        print(f"{where}: skipped {bad.where}: {bad.reason}", file=sys.stderr, flush=True)

    def close(self, status: str, step: int, weights: Mapping[str, Tensor], metrics: Mapping[str, float], skipped: int) -> None:
        """Write the final weights and the summary."""
        if self._profiler:
            self._end_profile(self._profiler.stop())
        if not self.folder:
            return
        self._progress.close()
        if status == "finished":
            self.folder.write_model(weights)
        samples = step * self.job.config.batch.size
        summary = {
            "status": status,
            "step": step,
            "samples": samples,
            "seconds": round(self.seconds, 3),
            "samples_per_second": round(samples / self.seconds, 3),
            "weights_sha256": weights_sha256(weights),
            "metrics": dict(metrics),
            "skipped": skipped,
        }
        self.folder.write_summary(summary)
        self._recorder.write(summary)

    def say(self, text: str) -> None:
        if self.folder:
            self._progress.line(text)

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        if self.folder:
            self._metrics.log(step, values)
            self.job.accelerator.log(dict(values), step=step)


def peak_memory(device: torch.device) -> float:
    """Bytes of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
