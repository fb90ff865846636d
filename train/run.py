"""One run, from its settings to its summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train import config as configuration
from train import determinism
from train.config import Config
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from train.parallel.launch import Launch

DEFAULT = Path(__file__).parent.parent / "configs" / "digits.yaml"


def read_settings(settings: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """The configuration that the words of a command line stand for, files and `key=value` over them, and where each given key
    was said."""
    files = [Path(setting) for setting in settings if "=" not in _first_word(setting)]
    overrides = [setting for setting in settings if "=" in _first_word(setting)]
    return _load(files or [DEFAULT], overrides)


def _first_word(setting: str) -> str:
    """Up to a slash: what follows may be a folder's name, or a path in a value."""
    return setting.partition("/")[0]


def load_config(files: Sequence[Path], overrides: Sequence[str]) -> Config:
    return _load(files, overrides)[0]


def _load(files: Sequence[Path], overrides: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """With the names and arguments checked by the rooms that own them."""
    from train import models, optim, tasks
    from train.data import transforms

    checks = {
        "model": models.check,
        "optimizer": optim.check_optimizer,
        "schedule": optim.check_schedule,
        "data.transforms": transforms.check,
    }
    config, places = configuration.load(files, overrides, checks)
    if problems := tasks.check(config):
        lines = [f"{places.get(problem.key, 'the configuration')}: {problem.key}: {problem.message}" for problem in problems]
        raise UsageError("\n".join(lines))
    return config, places


def run(
    config: Config,
    places: Mapping[str, str],
    *,
    dry_run: bool,
    stop_at: int | None = None,
    profile: tuple[int, int] | None = None,
) -> str:
    """Train, to the end or to the step `stop_at`, or with `dry_run` only say what would be trained.

    `profile` names the first and the last of the steps that are profiled. `places` says where the keys of `config` were said,
    for the receipt. Returns "finished" or "stopped".
    """
    determinism.prepare_environment(config.run)
    from accelerate import Accelerator

    from train import agreement, resume, switches, tracking
    from train.job import lanes_of, prepare
    from train.journal import Journal
    from train.parallel import ENGINES
    from train.parallel.mode import choose
    from train.parallel.processes import Processes
    from train.profiling import profiler
    from train.run_folder import RunFolder
    from train.stopping import Interrupted, StopRequest, stop_with_the_launcher
    from train.trainer import Trainer

    stop_with_the_launcher()
    main = os.environ.get("RANK", "0") == "0"
    trackers = tracking.resolve(config.tracking, config.folder) if main else tracking.Trackers()
    facts = launch_facts()
    mode = choose(facts, config.parallel, config.speed)
    facts = switches.over(facts, config.speed)
    if mode.name == "tensor":
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)  # Accelerate's own way is for models of transformers alone
    accelerator = Accelerator(
        cpu=mode.device == "cpu",  # without CUDA a bare Accelerator would let launched processes train apart
        log_with=trackers.log_with or None,
        project_dir=config.folder,
        **switches.accelerator_options(config.speed),
    )
    processes = Processes(accelerator)
    _refuse_other_settings(accelerator)
    agreement.same_settings(config, processes)
    say = _say if processes.main else _say_nothing
    if config.batch.lanes != "auto":
        lanes_of(config, processes, mode)  # refuses what does not fit before anything is made
    if dry_run:
        job = prepare(config, accelerator, processes, mode, facts, say, saved=None)
        if processes.main:
            print(config.to_yaml() + "".join(f"# {line}\n" for line in job.describe()), end="")
        return "finished"

    stop = StopRequest()
    try:
        with stop.waiting():  # there is nothing to save yet
            folder = processes.on_main(lambda: RunFolder(config.folder))
            snapshot = resume.find(config, processes, say)
            job = prepare(config, accelerator, processes, mode, facts, say, saved=snapshot.state if snapshot else None)
        stop.training = True
    except Interrupted:
        return "stopped"
    except RunError:
        if not stop:
            raise
        return "stopped"  # the signal has cut off what was being read
    agreement.same_data(job.identity(), processes)
    if ENGINES[mode.name].together:
        agreement.same_folder(config.folder, processes)
    if snapshot is not None:
        resume.check(snapshot, job.identity())
    finished_at = processes.share(folder.finished_at() if folder else None)
    if finished_at is not None and resume.nothing_to_do(finished_at, snapshot, config, job.total_steps):
        say(f"nothing to do: {config.folder} finished at step {finished_at}")
        return "finished"
    if profile:
        profiler.check(profile, snapshot.step if snapshot else 0, job.total_steps)
    for line in (f"run: {config.folder}", *trackers.notes, *job.describe()):
        say(line)
    trainer = Trainer(job, stop, snapshot, stop_at=stop_at)
    journal = Journal(job, folder, places, snapshot, evaluated=trainer.evaluated, seconds=trainer.seconds, profile=profile)
    trainer.wandb_id = journal.start_trackers(trackers, trainer.step, trainer.wandb_id)
    status = trainer.fit(journal)
    journal.close(status, trainer.step, trainer.final_weights(), trainer.metrics, trainer.skipped)
    accelerator.end_training()
    if processes.main:
        print(config.folder)
    return status


def launch_facts() -> Launch:
    """What this process was started with and on."""
    import torch

    from train import driver
    from train.parallel import launch

    found = driver.find()
    old_driver = driver.problem(found, torch.version.cuda)
    devices = torch.cuda.device_count() if not old_driver and torch.cuda.is_available() else 0
    old_driver = old_driver or driver.problem(found, torch.version.cuda, works=devices > 0)
    precisions = launch.precisions() if devices else ()
    version = str(found) if found else None
    return launch.read(os.environ, devices=devices, precisions=precisions, driver=version, old_driver=old_driver)


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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_nothing(text: str) -> None:
    pass
