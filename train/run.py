"""From the words of a command line to the end of its run, or of its runs with several seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train import config as configuration
from train import determinism
from train.config import Config
from train.errors import UsageError

if TYPE_CHECKING:
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
    from train.stopping import StopRequest, stop_with_the_launcher

    stop_with_the_launcher()
    if config.seeds:
        from train.group.run import run_group

        return run_group(config, places, dry_run=dry_run, stop_at=stop_at, profile=profile)
    from train.stages import Run

    one = Run(config, places)
    if dry_run:
        plan = one.plan()
        if one.processes.main:
            print(config.to_yaml() + "".join(f"# {line}\n" for line in plan), end="")
        return "finished"
    stop = StopRequest()
    if not one.open(stop):
        return "stopped"
    stop.training = True
    if one.nothing_to_do():
        return "finished"
    for line in (f"run: {config.folder}", *one.trackers.notes, *one.job.describe()):
        one.say(line)
    one.start(stop, stop_at=stop_at, profile=profile)
    status = one.trainer.fit(one.journal)
    one.close(status)
    if one.processes.main:
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
