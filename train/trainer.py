"""The training loop, from top to bottom: `fit` is the run, `train_step` is one update of the weights."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any, Literal

from torch import Tensor

from train import memory, snapshots, tasks
from train.batches import training_batches, validation_batches
from train.checkpoint import Snapshot
from train.config import Every
from train.courses import Course, complete
from train.data.loader import Batch, refusal
from train.errors import LockstepError, RunError
from train.evaluation import evaluate
from train.job import Job
from train.journal import Journal
from train.learner import Learner
from train.optim import learning_rate, set_learning_rate
from train.parallel.engine import LanePass
from train.profiling.labels import labelled
from train.receipt import recorder as receipt
from train.saving import Saver
from train.seeds import seed_lane
from train.stopping import Interrupted, StopRequest

Status = Literal["finished", "stopped"]


class Trainer:
    """Trains a job from a snapshot, or from its beginning, to its end or to a stop."""

    def __init__(self, job: Job, stop: StopRequest, snapshot: Snapshot | None = None, *, stop_at: int | None = None) -> None:
        self.job, self.config, self.stop, self.stop_at = job, job.config, stop, stop_at
        self.accelerator, self.processes, self.task = job.accelerator, job.processes, job.task
        self.learner = Learner(self.config, job.mode, job.started, job.model, job.task, job.lanes, job.accelerator, job.blank)
        self.engine, self.optimizer, self.average = self.learner.engine, self.learner.optimizer, self.learner.average
        self.plain = self.engine.plain
        self.step = self.position = self.skipped = 0
        self.shown = 0  # this process's part of the digest of all samples until here
        self.seconds = 0.0
        self.epoch_length = job.epoch_length
        self.evaluated = 0  # the step after which the last evaluation was made
        self.metrics: dict[str, float] = {}
        self.judge, self.higher_is_better = tasks.judge(self.config)
        self.best: dict[str, Any] = {"value": None, "step": None, "since": 0}
        self.wandb_id: str | None = None
        if snapshot is not None:
            snapshots.put_back(self, snapshot)
        self.saved = self.step if snapshot else -1  # the step of the last checkpoint
        place, device = self.config.folder / "checkpoints", self.accelerator.device
        self.saver = Saver(place, self.config.checkpoint.keep, job.processes, device)

    def fit(self, journal: Journal) -> Status:
        """Train to the end, evaluating and saving on the way; after a signal, save and return early."""
        self.begin(journal)
        return complete(self.course())

    def course(self) -> Course[Status]:
        """What `fit` does once the workers have started, giving away the computing of each step."""
        try:
            with memory.explained(self):
                status = yield from self._fit()
        except BaseException as error:
            self.saver.settle()
            if isinstance(error, LockstepError) and error.everywhere:
                with contextlib.suppress(RuntimeError):
                    self.processes.gather(0)  # nobody goes away while another still saves
            raise
        self.settle_save()
        self.processes.gather(0)  # nobody goes away, which a launcher may take for a failure, before the checkpoint is there
        return status

    def _fit(self) -> Course[Status]:
        while True:
            last = self.step >= self.job.total_steps
            if (last or self.due(self.config.evaluate.every)) and not self.evaluate():
                return self.end("stopped")
            if last or self.out_of_patience:
                return self.end("finished")
            if self.due(self.config.checkpoint.every) and self.saved != self.step:
                self.save()
            if self.step == self.stop_at or not (yield from self.step_course()):
                return self.end("stopped")
            self.journal.end_step()

    def begin(self, journal: Journal) -> None:
        """Start the workers."""
        self.journal = journal
        self.validation = validation_batches(self.job)
        self.batches = training_batches(self.job, self.position)
        self.engine.model.train()

    def train_step(self) -> bool:
        """One update of the weights, or False when any process has been asked to stop."""
        return complete(self.step_course())

    def step_course(self) -> Course[bool]:
        with self.journal.waiting():
            batches = self._next_batches()
        weights = [self.task.weight(batch) for batch in batches]
        bad = sum(len(batch.bad) for batch in batches)
        words = self.processes.gather(bool(self.stop), sum(weights), bad, self.job.epoch_length or 0, self.saver.failed)
        if words[:, 4].any():
            self.saver.finish()  # which raises what has happened, where it has
            raise RunError("another process could not save", everywhere=True)
        weight, skipped = (int(word) for word in words[: self.job.lanes.processes, 1:3].sum(axis=0))
        self.epoch_length = int(words[:, 3].max()) or None  # whoever has consumed an epoch's last sample knows it
        if words[:, 0].any():
            return False
        rate = self._set_learning_rate()
        passes = [
            LanePass(lane, (batch if share else self.job.blank).to(self.accelerator.device), share)
            for lane, batch, share in zip(self.job.lanes.local, batches, weights, strict=True)
        ]
        losses, gradient_norm = yield partial(self._gradient, passes, weight)
        norm = float(gradient_norm)
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            self._refuse_step(norm, losses, batches)
        self.learner.update()
        if self.engine.reports:
            digests = zip(self.job.lanes.local, (batch.digest for batch in batches), strict=True)
            self.shown = receipt.shown(self.shown, self.step, digests)
        self.step += 1
        self.position += self.config.batch.size
        self.skipped += skipped
        self.journal.step(self.step)
        if self.due(Every(self.config.tracking.every)) or self.step == self.job.total_steps:
            self._log(losses, weight, {"lr": rate, "grad_norm": norm})
        return True

    def _gradient(self, passes: list[LanePass], weight: int) -> tuple[list[Tensor], Tensor]:
        """The lanes' losses, and the norm of the step's gradient, which is ready for the update."""
        losses = self.engine.forward_backward(passes, weight, partial(seed_lane, self.config.run.seed, self.step))
        return losses, self.learner.clip()

    @labelled("logging")
    def _log(self, losses: list[Tensor], weight: int, values: dict[str, float]) -> None:
        parts = self.processes.gather_objects([float(loss) for loss in losses] if self.engine.reports else [])
        loss = math.fsum(loss for part in parts for loss in part) / max(weight, 1)
        self.journal.training(self.step, {"loss": loss, **values}, self.shown_everywhere())

    def shown_everywhere(self) -> int:
        return receipt.together(self.processes.gather(self.shown)[:, 0].tolist())

    @labelled("input wait")
    def _next_batches(self) -> list[Batch]:
        """One micro-batch for each lane of this process; fewer when a signal ends the wait for them."""
        batches: list[Batch] = []
        try:
            for _ in self.job.lanes.local:
                with self.stop.waiting():
                    batch = next(self.batches)
                batches.append(self._checked(batch, f"step {self.step + 1}"))
        except Interrupted:
            pass
        return batches

    def _checked(self, batch: Batch, where: str) -> Batch:
        """A batch whose samples could be read, or whose bad ones may be skipped and are listed."""
        everywhere = not self.job.mode.shares_lanes  # all have the same batches
        if batch.failure:
            raise RunError(batch.failure, everywhere=everywhere)
        for bad in batch.bad:
            if self.config.data.on_error == "stop":
                raise RunError(str(refusal(bad)), everywhere=everywhere)
            if self.engine.reports:
                self.journal.skipped(where, bad)
        return batch

    def _set_learning_rate(self) -> float:
        rate = learning_rate(
            self.config.optimizer, self.config.schedule, self.step, warmup=self.job.warmup_steps, total=self.job.total_steps
        )
        set_learning_rate(self.optimizer.optimizer, rate)
        return rate

    def _refuse_step(self, norm: float, losses: list[Tensor], batches: list[Batch]) -> None:
        """Stop all processes before the weights take up what is not a number."""
        here = zip(self.job.lanes.local, losses, batches, strict=True) if self.engine.reports else ()
        found = [(lane, float(loss), batch.keys) for lane, loss, batch in here if not math.isfinite(float(loss))]
        lines = [
            f"lane {lane}: loss {loss}, samples " + ", ".join(self.job.sources.train.where(key) for key in keys[:16])
            for part in self.processes.gather_objects(found)
            for lane, loss, keys in part
        ]
        raise RunError(
            f"step {self.step + 1}: the gradient's norm is {norm}. "
            + ("\n".join(["The loss is not finite in", *lines]) if lines else "The losses are finite, so the model overflowed.")
            + "\nThe weights were not updated and the last checkpoint is from before this step. Look at these samples, lower "
            "optimizer.lr, or set optimizer.clip_norm.",
            everywhere=True,
        )

    @labelled("evaluation")
    def evaluate(self) -> bool:
        """Measure the validation split unless this step's is done; False when a process was asked to stop meanwhile."""
        if self.validation is None or self.evaluated == self.step or self.config.evaluate.every.count == 0:
            return True
        model = self.plain if self.average is None else self.average.module
        explained = memory.explained(self, evaluation=True)
        with explained, self.journal.pausing(), self.accelerator.autocast(), self.engine.evaluating(model) as outputs:
            where = f"validation after step {self.step}"
            # The list is for `evaluate` to begin the reading, which has to be waited for and may fail.
            batches = (self._checked(batch, where) for loader in [self.validation] for batch in loader)
            try:
                blank = self.job.blank if self.engine.together else None
                device, reports = self.accelerator.device, self.engine.reports
                passing = memory.explained(self, evaluation=True)(outputs)
                metrics = evaluate(self.task, passing, batches, device, self.processes, self.stop, blank, reports=reports)
            except RunError:  # all processes'; the training so far is none of its causes
                if self.config.checkpoint.every.count and self.saved != self.step:
                    self.save()
                raise
        if metrics is None:
            return False
        scheduled = self.due(self.config.evaluate.every)
        self.evaluated = self.step
        self.metrics = {f"validation/{name}": value for name, value in metrics.items()}
        self.journal.evaluation(self.step, self.metrics)
        # One that only the end has brought must not decide how a longer run goes on.
        if scheduled and self._improved(metrics[self.judge]) and self.config.checkpoint.every.count:
            self.save()
        return True

    def _improved(self, value: float) -> bool:
        best = self.best["value"]
        if best is not None and (value <= best if self.higher_is_better else value >= best):
            self.best["since"] += 1
            return False
        self.best = {"value": value, "step": self.step, "since": 0}
        return True

    @property
    def out_of_patience(self) -> bool:
        return bool(0 < self.config.evaluate.patience <= self.best["since"])

    def due(self, every: Every) -> bool:
        """Whether the step just made completes another interval."""
        if every.count == 0 or self.step == 0:
            return False
        if every.unit == "steps":
            return self.step % every.count == 0
        if self.epoch_length is None:  # a stream has not come to its end
            return False
        samples = every.count * self.epoch_length
        return self.position // samples > (self.position - self.config.batch.size) // samples

    def end(self, status: Status) -> Status:
        if self.saved != self.step and (self.config.checkpoint.every.count or status == "stopped"):
            self.save()
        return status

    @labelled("saving")
    def save(self) -> None:
        """Copy this moment, which all processes do, and let it be written while the training goes on."""
        with self.journal.pausing():
            self.settle_save()  # before the next copy is made
            self.saver.save(snapshots.take(self), self.best["step"])
        self.saved = self.step

    def settle_save(self) -> None:
        """Wait for the checkpoint that is being written, and enter it into the receipt."""
        if saved := self.saver.finish():
            self.journal.saved(saved)

    def final_weights(self) -> dict[str, Tensor]:
        """The weights that the run is for: the averaged ones where there are any."""
        return self.engine.whole((self.plain if self.average is None else self.average.module).state_dict())
