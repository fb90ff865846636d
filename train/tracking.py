"""Where a run's numbers go: metrics.jsonl always; Weights & Biases and TensorBoard, through Accelerate, when asked.

Tracking is never worth a run: once training may start, no failure of a tracker stops it, and none delays it by more
than INIT_SECONDS at the start and FINISH_SECONDS at the end. Only the main process uses this file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accelerate.tracking import GeneralTracker, WandBTracker
from pydantic import ValidationError

from train import config
from train.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from accelerate import Accelerator

INIT_SECONDS = 30  # all that W&B may take at the start, the way back to offline included
FINISH_SECONDS = 30  # all that W&B may take at the end to upload what it still holds
_WAY_BACK_SECONDS = 10  # of INIT_SECONDS: stopping the attempt to go online and starting offline (measured: 1 to 4)

WandBMode = Literal["online", "offline", "disabled"]


class Metrics:
    """metrics.jsonl: one JSON object a line, `{"step": 120, "train/loss": 0.5}`, on disk as soon as it is logged.

    Floats are written so that they read back bit for bit. JSON has no words for the others, so they are the strings
    "nan", "inf" and "-inf", which `float()` reads.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()


def rewind(path: Path, step: int, evaluated: int) -> None:
    """Forget what metrics.jsonl says of the steps after `step`, of evaluations after the step `evaluated`, and a last line torn
    by a crash; -1 forgets all.

    The steps that a resume repeats then stand in the file once, with the values of the history that survived.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= (evaluated if '"validation/' in line else step)]
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _step_of(line: str) -> float:
    """The step of a line, or infinity if the line is not whole."""
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except ValueError:
        return math.inf


class WandB(WandBTracker):  # type: ignore[misc]  # Accelerate ships no types
    """Accelerate's W&B tracker, with bounded waits, one run across resumes, and our step as the x axis.

    W&B drops values whose own step does not grow, as after a resume from before a crash; so our step is logged as a
    value, and W&B's own step is left to count the calls.
    """

    def __init__(self, project: str, mode: WandBMode, run_dir: Path) -> None:
        super().__init__(project)
        # When one fails, the next is tried; the last cannot fail.
        self.modes: dict[WandBMode, None] = dict.fromkeys((mode, "offline", "disabled"))
        self.run_dir = run_dir

    def configure(self, run_id: str, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """What is known only once the run folder and the checkpoint are open."""
        import wandb

        self.say = say
        self.init_kwargs: dict[str, Any] = {
            "id": run_id,
            "resume": "allow",
            "name": self.run_dir.name,
            "dir": self.run_dir,
            "config": dict(config),
            "settings": wandb.Settings(
                init_timeout=INIT_SECONDS - _WAY_BACK_SECONDS,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
                console="off",
                disable_code=True,
                disable_git=True,
                # With W&B's own 15 s, a kill leaves a record that `wandb sync` cannot read, nor the others beside it.
                x_transaction_log_flush_interval=1.0,
            ),
        }

    def start(self) -> None:
        import wandb

        for mode in self.modes:
            try:
                self.run = wandb.init(project=self.run_name, mode=mode, **self.init_kwargs)
                self.run.define_metric("*", step_metric="step")
                break
            except Exception as error:  # whatever goes wrong in a tracker, it is not the run's failure
                instead = f"recording offline; {_how_to_sync(self.run_dir)}" if mode == "online" else "going on without"
                self._stop(f"W&B did not start {mode} ({_reason(error)}): {instead}")
        if mode == "online":
            self.say(f"W&B: {self.run.url}")

    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        import wandb

        try:
            self.run.log({"step": step, **values})
        except Exception as error:
            self._stop(f"W&B stopped at step {step} ({_reason(error)}): going on without")
            self.run = wandb.init(mode="disabled")

    def finish(self) -> None:
        try:
            self.run.finish()
        except Exception as error:
            self._stop(f"W&B did not finish ({_reason(error)}): {_how_to_sync(self.run_dir, 'run-*')}")

    def _stop(self, text: str) -> None:
        """Say why W&B's service is not needed any more, and end it: it would refuse the same run id a second time."""
        import wandb

        self.say(text)
        with contextlib.suppress(Exception):
            wandb.teardown()


@dataclass
class Trackers:
    """What was decided before anything is created: for `Accelerator(log_with=log_with or None)`, and for the person."""

    log_with: list[str | GeneralTracker] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve(tracking: config.Tracking, run_dir: Path) -> Trackers:
    """Decide which trackers this run has. Creates nothing in the run folder and touches no network.

    Raises UsageError when what was asked for cannot be had.
    """
    trackers, problems = Trackers(), list[str]()
    if tracking.wandb != "off":
        try:
            mode, note = _wandb_mode(tracking.wandb, run_dir)
        except UsageError as error:
            problems.append(str(error))
        else:
            trackers.notes += [note] if note else []
            trackers.log_with += [WandB(tracking.project, mode, run_dir)] if mode != "disabled" else []
    if tracking.tensorboard:
        trackers.log_with.append("tensorboard")
        if importlib.util.find_spec("tensorboard") is None:
            problems.append(
                "tracking.tensorboard is true, but TensorBoard is not installed: `pip install tensorboard` "
                "(it is in the extra lockstep[tensorboard]), or set tracking.tensorboard=false"
            )
    if problems:
        raise UsageError("\n".join(problems))
    return trackers


def start(
    accelerator: Accelerator,
    trackers: Trackers,
    *,
    config: Mapping[str, Any],
    wandb_id: str | None,
    step: int,
    say: Callable[[str], None],
) -> str | None:
    """Open the trackers of an `Accelerator(log_with=..., project_dir=run_dir)` whose run has done `step` steps.

    Returns the id of the W&B run, to be kept in the checkpoint and given back as `wandb_id` at a resume. Then use
    `accelerator.log(values, step=step)` and `accelerator.end_training()`.
    """
    for tracker in trackers.log_with:
        if isinstance(tracker, WandB):
            wandb_id = wandb_id or secrets.token_hex(4)
            tracker.configure(wandb_id, config, say)
    # TensorBoard's folder in the run folder, where a reader forgets the steps that this start repeats.
    accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    return wandb_id


def _wandb_mode(asked: str, run_dir: Path) -> tuple[WandBMode, str | None]:
    """W&B's mode for what was asked, its own settings and its key, and a line for the person where they differ."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]  # how a compose file says "not set"; W&B refuses an empty mode
    # W&B's reports on itself cost up to 20 s at the exit of a process whose server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    try:
        own_mode = wandb.setup().settings.mode
        has_key = asked != "offline" and wandb.login(prompt=False, verify=False)
    except ValidationError as error:  # without the values, as one may be a key
        raise _refused("; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())) from None
    except wandb.Error as error:
        raise _refused(_reason(error)) from None
    offline = f"W&B records offline; {_how_to_sync(run_dir)}"
    if own_mode == "disabled":
        return "disabled", "W&B is off: its own mode is disabled (WANDB_MODE)"
    if own_mode in ("offline", "dryrun"):
        return "offline", f"{offline} (its own mode is offline: see WANDB_MODE, or run `wandb online`)"
    if asked == "offline":
        return "offline", offline
    if has_key:
        return "online", None
    if asked == "auto":
        return "offline", f"{offline} (there is no W&B key: set WANDB_API_KEY or run `wandb login`)"
    raise UsageError(
        "tracking.wandb is online, but there is no W&B key: set WANDB_API_KEY or run `wandb login`, "
        "or set tracking.wandb to auto, offline or off"
    )


def _refused(reason: str) -> UsageError:
    return UsageError(
        f"W&B refuses its own settings: {reason}\n"
        "correct them (WANDB_... variables, netrc, W&B's settings file), or set tracking.wandb=off"
    )


def _how_to_sync(run_dir: Path, runs: str = "offline-run-*") -> str:
    return f"upload later with: wandb sync {shlex.quote(str(run_dir / 'wandb'))}/{runs}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
