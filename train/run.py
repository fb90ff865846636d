"""One run, from its settings to its summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from train import config as configuration
from train import determinism
from train.config import Config


def load_config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    """The configuration, with its names and arguments checked by the rooms that own them."""
    from train import models, optim
    from train.data import transforms

    checks = {
        "model": models.check,
        "optimizer": optim.check_optimizer,
        "schedule": optim.check_schedule,
        "data.transforms": transforms.check,
    }
    return configuration.load(files, overrides, checks)[0]


def run(config: Config, *, dry_run: bool) -> str:
    """Train, or with `dry_run` only say what would be trained. Returns "finished" or "stopped"."""
    determinism.prepare_environment(config.run)
    import torch
    from accelerate import Accelerator

    from train import resume, tracking
    from train.job import prepare
    from train.journal import Journal
    from train.parallel.processes import Processes
    from train.run_folder import RunFolder
    from train.stopping import StopRequest, stop_with_the_launcher
    from train.trainer import Trainer

    stop_with_the_launcher()
    main = os.environ.get("RANK", "0") == "0"
    trackers = tracking.resolve(config.tracking, config.folder) if main else tracking.Trackers()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without CUDA a bare Accelerator would let launched processes train apart
        log_with=trackers.log_with or None,
        project_dir=config.folder,
    )
    processes = Processes(accelerator)
    say = _say if processes.main else _say_nothing
    if dry_run:
        job = prepare(config, accelerator, processes, say, saved=None)
        if processes.main:
            print(config.to_yaml() + "".join(f"# {line}\n" for line in job.describe()), end="")
        return "finished"

    folder = processes.on_main(lambda: RunFolder(config.folder))
    stop = StopRequest()
    snapshot = resume.find(config, processes, say)
    job = prepare(config, accelerator, processes, say, saved=snapshot.state if snapshot else None)
    if snapshot is not None:
        resume.check_data(snapshot, job.data_identity())
        if processes.share(folder.finished_at() if folder else None) == snapshot.step >= job.total_steps:
            say(f"nothing to do: {config.folder} finished at step {snapshot.step}")
            return "finished"
    for line in (f"run: {config.folder}", *trackers.notes, *job.describe()):
        say(line)
    trainer = Trainer(job, stop, snapshot)
    journal = Journal(job, folder, trainer.step, trainer.seconds)
    trainer.wandb_id = journal.start_trackers(trackers, trainer.step, trainer.wandb_id)
    status = trainer.fit(journal)
    journal.close(status, trainer.step, trainer.final_weights(), trainer.metrics, trainer.skipped)
    accelerator.end_training()
    if processes.main:
        print(config.folder)
    return status


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
