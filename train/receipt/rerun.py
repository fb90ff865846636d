"""Training again what a receipt tells of, from the receipt alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from train.config import Config, recorded, values
from train.errors import LockstepError
from train.receipt import document
from train.receipt.compare import causes
from train.receipt.document import Receipt
from train.receipt.environment import ROOT, digest

_OWN_WORDS = 25  # lines of a failed run that are shown


class CannotTell(LockstepError):
    """The run cannot be made again here, so that nothing is known of it."""

    exit_code = 5


@contextmanager
def code(receipt: Receipt, folder: Path, *, here: bool) -> Iterator[Path]:
    """A checkout with the code of the run: this one where it is the same, or where that is asked for, else a worktree."""
    wanted = {environment["code"]["digest"]: environment["code"] for environment in receipt["environments"]}
    if here or set(wanted) == {digest(ROOT)}:
        yield ROOT
        return
    if len(wanted) > 1:
        raise CannotTell("the run's starts had different code, so that no one code makes it; verify its segments (--segment)")
    [made] = wanted.values()
    commit = made["commit"]
    if commit is None or made["diff_left_out"]:
        lacking = (
            "its diff, which was too long to keep"
            if commit
            else "its commit: it was no checkout of git, or an image built without LOCKSTEP_COMMIT"
        )
        raise CannotTell(
            f"this checkout's code is not the run's, and the receipt does not have {lacking}. --here takes this code"
        )
    if _git(ROOT, "cat-file", "-e", f"{commit}^{{commit}}").returncode:
        _git(ROOT, "fetch", "--quiet", "origin", commit)
    tree = folder / "code"
    added = _git(ROOT, "worktree", "add", "--quiet", "--detach", str(tree), commit)
    if added.returncode:
        raise CannotTell(
            f"commit {commit} is not in this repository and cannot be fetched: {added.stderr.strip()}. Verify in a clone that "
            "has it, or with --here by this checkout's code"
        )
    try:
        if made["diff"] and (applied := _git(tree, "apply", "-", stdin=made["diff"])).returncode:
            raise CannotTell(f"the receipt's changes do not apply to commit {commit}: {applied.stderr.strip()}")
        if digest(tree) != made["digest"]:
            raise CannotTell(f"commit {commit} with the receipt's changes is not the code that the run had")
        yield tree
    finally:
        _git(ROOT, "worktree", "remove", "--force", str(tree))


def _git(root: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=root, input=stdin, capture_output=True, text=True)


def config(receipt: Receipt, tree: Path, data: str | None) -> Config:
    """The run's configuration with its data here."""
    content = _here(receipt["config"], tree)
    if data is not None:
        content["data"]["path"] = values.data_path(data)
    resolved = recorded(content)
    path = resolved.data.path
    if path.startswith("/") and not Path(*values.before_wildcard(path)).exists():
        raise CannotTell(f"the data are not here: there is no {path}. Say where they are: --data PATH")
    return resolved


def _here(value: Any, tree: Path) -> Any:
    """Paths below the run's checkout, below this one."""
    if isinstance(value, dict):
        return {key: _here(item, tree) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(document.CHECKOUT):
        return str(tree / value.removeprefix(document.CHECKOUT).lstrip("/"))
    return value


def rerun(
    receipt: Receipt, tree: Path, config: Config, folder: Path, *, processes: int, stop_at: int | None, resume_from: Path | None
) -> Receipt:
    """Train, and give the receipt of that."""
    folder.mkdir(parents=True)
    content = config.model_dump(mode="json")
    content["run"] |= {"output_dir": str(folder / "outputs"), "resume_from": str(resume_from) if resume_from else None}
    content["tracking"] |= {"wandb": "off", "tensorboard": False}
    content["parallel"] = {"device": content["parallel"]["device"]}
    content["batch"]["lanes"] = receipt["lanes"]
    (folder / "config.yaml").write_text(values.dump(content), encoding="utf-8")
    launch = receipt["environments"][-1]["launch"]
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if processes > 1 else "NO",
        "num_processes": processes,
        "use_cpu": launch["device"] == "cpu",
        "mixed_precision": launch["precision"],
        "dynamo_config": {
            "dynamo_backend": launch["compiler"].upper(),
            "dynamo_use_regional_compilation": launch["blocks"],
        },
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(accelerate), encoding="utf-8")
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "-q", "--main_process_port", "0"]
    words = ["--config_file", str(folder / "accelerate.yaml"), str(tree / "train" / "main.py"), str(folder / "config.yaml")]
    stop = ["--stop-at", str(stop_at)] if stop_at else []
    variables = {**os.environ, **receipt["environments"][-1]["variables"], "PYTHONPATH": str(tree)}
    with (folder / "log").open("w") as log:
        subprocess.run([*launcher, *words, *stop], cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    made = list((folder / "outputs").glob(f"*/{document.NAME}"))
    again = document.read(made[0]) if made else None
    if again is None or again["result"] is None:
        said = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        known = causes(receipt, again) if again else []
        raise CannotTell("\n".join(["the run could not be made again:", *said[-_OWN_WORDS:], *known]))
    shutil.rmtree(made[0].parent / "checkpoints", ignore_errors=True)
    return again
