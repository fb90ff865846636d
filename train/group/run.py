"""From one configuration with `seeds` to a run of each, and what they have in common at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

from train import courses, tasks
from train.config import Config
from train.errors import LockstepError, RunError, UsageError
from train.group import beside, summary
from train.group.display import GroupDisplay
from train.run_folder import RunFolder
from train.stages import Run
from train.stopping import StopRequest
from train.trainer import Status


def run_group(
    config: Config, places: Mapping[str, str], *, dry_run: bool, stop_at: int | None, profile: tuple[int, int] | None
) -> Status:
    """As `train.run.run` does it for one."""
    runs = _set_up(config, places, profile)
    seeds = ", ".join(map(str, runs))
    if dry_run:
        plan = next(iter(runs.values())).plan()
        print(config.to_yaml() + "".join(f"# {line}\n" for line in (f"seeds: {seeds}", *plan)), end="")
        return "finished"
    stop = StopRequest()
    folder = RunFolder(config.folder)
    folder.write("config.yaml", config.to_yaml())
    for run in runs.values():
        if not run.open(stop):
            return "stopped"
        run.job.workers = max(min(run.job.workers, 1), run.job.workers // len(runs))  # which are shared out
    left = {seed: run for seed, run in runs.items() if not run.nothing_to_do()}
    if left:
        way = beside.choose({seed: run.job for seed, run in left.items()})
        stop.training = True
        notes = [line for run in left.values() for line in (f"run: {run.config.folder}", *run.trackers.notes)]
        for line in (*notes, *next(iter(left.values())).job.describe(), f"seeds: {seeds}, {way.told}"):
            _say(line)
        if not _train(left, stop, way, stop_at):
            return "stopped"
    metric, _ = tasks.judge(config)
    summary.write(folder, f"validation/{metric}", [run.config for run in runs.values()], _say)
    print(config.folder)
    return "finished"


def members(config: Config) -> list[Config]:
    """The run of each seed, as it is when it is trained alone."""
    runs = [config.run.model_copy(update={"seed": seed}) for seed in config.seeds]
    return [config.model_copy(update={"run": run, "seeds": ()}) for run in runs]


def _set_up(config: Config, places: Mapping[str, str], profile: tuple[int, int] | None) -> dict[int, Run]:
    """The runs by their seeds, or a UsageError where they cannot be trained together."""
    problems = []
    if "run.seed" in places:
        problems.append(
            f"{places['run.seed']}: run.seed: seeds gives those of the runs ({places['seeds']}); take one of the two out"
        )
    if config.tracking.wandb != "off":
        problems.append("tracking.wandb: W&B follows one run in a process; set it to off, and take tracking.tensorboard")
    if config.speed.cuda_graphs:
        problems.append("speed.cuda_graphs: graphs are replayed on one stream, and each seed has its own; set it to false")
    if profile:
        problems.append("--profile: what a step's time goes into is told of one run; give run.seed in place of seeds")
    if problems:
        raise UsageError("\n".join(problems))
    said = {("run.seed" if key == "seeds" else key): place for key, place in places.items()}
    runs: dict[int, Run] = {}
    for member in members(config):
        runs[member.run.seed] = run = Run(member, said, mark=f"seed {member.run.seed}: ")
        if run.mode.name != "single":
            raise UsageError(
                f"seeds: several seeds are trained by one process on one device, and the mode is {run.mode.name} "
                f"({run.mode.reasons[0]}); start one process, or give each seed a run of its own by run.seed",
                everywhere=True,
            )
    return runs


def _train(runs: Mapping[int, Run], stop: StopRequest, way: beside.Way, stop_at: int | None) -> bool:
    """Whether all have come to their end. RunError where some have failed, which the others' going on has not changed."""
    display = GroupDisplay()
    for seed, run in runs.items():
        with way.surroundings(seed):
            run.start(stop, stop_at=stop_at, display=partial(display.of, seed))
            beside.draw_from_own_generator(run.trainer.plain)
    for run in runs.values():  # after the models and before the courses, so that no worker is forked beside threads
        run.trainer.begin(run.journal)
    started = {seed: _course(run, partial(display.end, seed)) for seed, run in runs.items()}
    ends = courses.conduct(started, way.submit, way.surroundings)
    if failed := [f"seed {seed}: {end}" for seed, end in ends.items() if isinstance(end, LockstepError)]:
        others = ["The other seeds went on."] if len(failed) < len(ends) else []
        raise RunError("\n".join([*failed, *others, "The same command goes on with what is left."]))
    return "stopped" not in ends.values()


def _course(run: Run, end: Callable[[], None]) -> courses.Course[Status]:
    """A run to its summary; a failure is told at once."""
    try:
        status = yield from run.trainer.course()
        run.close(status)
        return status
    except LockstepError as error:
        run.journal.say(f"failed, and the others go on: {error}")
        raise
    finally:
        end()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
