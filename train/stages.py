"""The stages of a run: set up, opened, started, trained, closed; `train.run` takes one through them, `train.group` several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from accelerate import Accelerator

from train import agreement, resume, switches, tracking
from train.config import Config
from train.errors import RunError, UsageError
from train.job import lanes_of, prepare
from train.journal import Journal
from train.parallel import engine_of
from train.parallel.mode import choose
from train.parallel.processes import Processes
from train.profiling import profiler
from train.progress import Display
from train.run_folder import RunFolder
from train.stopping import Interrupted, StopRequest
from train.trainer import Status, Trainer


class Run:
    """`places` says where the keys of `config` were said; `mark` begins each line that is said of the run."""

    def __init__(self, config: Config, places: Mapping[str, str], mark: str = "") -> None:
        from train.run import launch_facts

        self.config, self.places, self.mark = config, places, mark
        main = os.environ.get("RANK", "0") == "0"
        self.trackers = tracking.resolve(config.tracking, config.folder) if main else tracking.Trackers()
        facts = launch_facts()
        self.mode = choose(facts, config.parallel, config.speed)
        self.facts = switches.over(facts, config.speed)
        if self.mode.name == "tensor":
            os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # Accelerate's own way is for models of transformers alone
        self.accelerator = Accelerator(
            cpu=self.mode.device == "cpu",  # without CUDA a bare Accelerator would let launched processes train apart
            log_with=self.trackers.log_with or None,
            project_dir=config.folder,
            **switches.accelerator_options(config.speed),
        )
        self.processes = Processes(self.accelerator)
        _refuse_other_settings(self.accelerator)
        agreement.same_settings(config, self.processes)
        if config.batch.lanes != "auto":
            lanes_of(config, self.processes, self.mode)  # refuses what does not fit before anything is made

    def say(self, text: str) -> None:
        if self.processes.main:
            print(f"{self.mark}{text}", file=sys.stderr, flush=True)

    def plan(self) -> list[str]:
        """What would be trained."""
        job = prepare(self.config, self.accelerator, self.processes, self.mode, self.facts, self.say, saved=None)
        return job.describe()

    def open(self, stop: StopRequest) -> bool:
        """Find the checkpoint to go on from and make the job; False when a signal has ended that."""
        try:
            with stop.waiting():  # there is nothing to save yet
                self.folder = self.processes.on_main(lambda: RunFolder(self.config.folder))
                self.snapshot = snapshot = resume.find(self.config, self.processes, self.say)
                saved = snapshot.state if snapshot else None
                parts = (self.config, self.accelerator, self.processes, self.mode, self.facts)
                self.job = prepare(*parts, self.say, saved=saved)
        except Interrupted:
            return False
        except RunError:
            if not stop:
                raise
            return False  # the signal has cut off what was being read
        return True

    def nothing_to_do(self) -> bool:
        """Whether it has finished before. Refuses data and a precision that are not those of the checkpoint."""
        agreement.same_data(self.job.identity(), self.processes)
        if engine_of(self.mode).together:
            agreement.same_folder(self.config.folder, self.processes)
        if self.snapshot is not None:
            resume.check(self.snapshot, self.job.identity())
        finished_at = self.processes.share(self.folder.finished_at() if self.folder else None)
        if finished_at is None or not resume.nothing_to_do(finished_at, self.snapshot, self.config, self.job.total_steps):
            return False
        self.say(f"nothing to do: {self.config.folder} finished at step {finished_at}")
        return True

    def start(
        self,
        stop: StopRequest,
        *,
        stop_at: int | None = None,
        profile: tuple[int, int] | None = None,
        display: Callable[[int, int], Display] | None = None,
    ) -> None:
        """Make the trainer, and the journal, whose display is made of the steps in all and the steps made."""
        done = self.snapshot.step if self.snapshot else 0
        if profile:
            profiler.check(profile, done, self.job.total_steps)
        self.trainer = Trainer(self.job, stop, self.snapshot, stop_at=stop_at)
        self.journal = Journal(
            self.job,
            self.folder,
            self.places,
            self.snapshot,
            evaluated=self.trainer.evaluated,
            seconds=self.trainer.seconds,
            profile=profile,
            display=display(self.job.total_steps, done) if display else None,
        )
        self.trainer.wandb_id = self.journal.start_trackers(self.trackers, self.trainer.step, self.trainer.wandb_id)

    def close(self, status: Status) -> None:
        trainer = self.trainer
        self.journal.close(status, trainer.step, trainer.final_weights(), trainer.metrics, trainer.skipped)
        self.accelerator.end_training()


def _refuse_other_settings(accelerator: Accelerator) -> None:
    """What accelerate config can ask for and this trainer does otherwise, or not at all."""
    if accelerator.gradient_accumulation_steps != 1:
        raise UsageError(
            f"accelerate is set to accumulate gradients over {accelerator.gradient_accumulation_steps} steps; here the lanes do "
            "that: take it out of the accelerate config and ACCELERATE_GRADIENT_ACCUMULATION_STEPS, and set batch.lanes"
        )
    if accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise UsageError(
            f"accelerate is set to distributed_type {accelerator.distributed_type.value}; NO, MULTI_GPU and FSDP are supported"
        )
