"""What `deploy/` gives to clusters: their commands, started as a cluster starts them, on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import left
from tests.conftest import HANG_SECONDS, ROOT, Launched, Runner, free_port
from tests.test_stopping import until

SLURM = ROOT / "deploy" / "slurm.sbatch"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"
DIGITS = ("parallel.device=cpu", "data.workers=1", "evaluate.every=0", "tracking.every=1")

# Stand-ins for Slurm's commands, of a job that has two nodes, both of which are this machine.
COMMANDS = {
    "scontrol": """case "$1 $2" in
"show hostnames") echo localhost; echo localhost;;
"requeue $SLURM_JOB_ID") touch "$SLURM_STANDIN/requeued";;
esac""",
    "srun": """while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> "$SLURM_STANDIN/tasks"; done
code=0; for task in $(cat "$SLURM_STANDIN/tasks"); do wait "$task" || code=$?; done
rm "$SLURM_STANDIN/tasks"; exit $code""",
    "scancel": """[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM $(cat "$SLURM_STANDIN/tasks")""",
}

Launch = Callable[..., Launched]


@pytest.fixture
def sbatch(launch: Launch, tmp_path: Path) -> Callable[..., Launched]:
    """What `sbatch` does with the script once somebody has edited its two places: run it on the first node."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}

    def submit(*settings: str) -> Launched:
        edited = tmp_path / "edited.sbatch"
        train = f"train=(train/main.py {' '.join(settings)} run.output_dir={tmp_path / 'outputs'})"
        lines = [train if line.startswith("train=") else line for line in SLURM.read_text().splitlines()]
        assert train in lines
        edited.write_text("\n".join(lines) + "\n")
        environment = job | {"SLURM_STANDIN": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
        return launch(str(shutil.which("bash")), str(edited), env=environment)

    return submit


def one_process(folder: Path, *settings: str) -> str:
    """The weights of the same run on one machine."""
    folder.mkdir()
    one = Runner(folder)
    finished = one.run(str(ROOT / settings[0]), *settings[1:])
    assert finished.code == 0, finished.output
    return left.weights(one)


def test_the_batch_script_is_bash_and_asks_slurm_before_its_first_command() -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    lines = SLURM.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [place for place, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert asked and max(asked) < first  # sbatch reads no further
    assert sum(line.startswith("# Edit ") for line in lines) == 2


@pytest.mark.slow
def test_a_slurm_job_saves_before_its_time_is_over_and_goes_on_when_it_is_queued_again(
    sbatch: Callable[..., Launched], tmp_path: Path
) -> None:
    settings = ("configs/digits.yaml", *DIGITS, "steps=150")
    first = sbatch(*settings)
    train = Runner(tmp_path)
    until(lambda: "step 10/" in first.output, first)
    os.kill(first.process.pid, signal.SIGUSR1)  # as --signal=B:USR1 says, to the script alone
    assert first.process.wait(HANG_SECONDS) != 0
    assert "mode: ddp, 2 processes on 2 machines" in first.output
    assert "SIGTERM: saving at the next step boundary" in first.output
    assert (tmp_path / "slurm" / "requeued").exists()
    assert left.summary(train)["status"] == "stopped"
    (tmp_path / "slurm" / "requeued").unlink()

    again = sbatch(*settings)
    assert again.process.wait(HANG_SECONDS) == 0, again.output
    assert "resuming: " in again.output
    assert not (tmp_path / "slurm" / "requeued").exists()
    assert left.weights(train) == one_process(tmp_path / "one", *settings)


@pytest.mark.slow
def test_a_slurm_job_that_fails_is_not_queued_again(sbatch: Callable[..., Launched], tmp_path: Path) -> None:
    failed = sbatch("configs/digits.yaml", *DIGITS, "steps=3", "data.path=/no/such/folder")
    assert failed.process.wait(HANG_SECONDS) == 1
    assert "/no/such/folder" in failed.output
    assert not (tmp_path / "slurm" / "requeued").exists()


def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    job, claim = yaml.safe_load_all(KUBERNETES.read_text())
    return job, claim


def test_the_trainjob_mounts_its_volumes_into_the_container_of_the_runtime() -> None:
    job, claim = parts()
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert replicated["name"] == container["name"] == "node"  # as in the runtime torch-distributed
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["outputs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and mounts["shm"] == "/dev/shm"
    assert f"run.output_dir={mounts['outputs']}" in job["spec"]["trainer"]["args"]
    assert KUBERNETES.read_text().count("# Edit ") == 2
    assert "\nWORKDIR /workspace\n" in (ROOT / "Dockerfile").read_text()
    assert {
        word.split("/")[1] for word in (*job["spec"]["trainer"]["command"], *job["spec"]["trainer"]["args"][:1]) if "/" in word
    } == {"workspace"}


@pytest.mark.slow
def test_the_command_of_the_trainjob_trains_in_the_environment_that_its_runtime_makes(launch: Launch, tmp_path: Path) -> None:
    job, _ = parts()
    trainer = job["spec"]["trainer"]
    nodes = trainer["numNodes"]
    here = {
        "/workspace/configs/cifar10.yaml": "/workspace/configs/digits.yaml",
        "run.output_dir=/outputs": f"run.output_dir={tmp_path}/outputs",
    }
    words = [here.get(word, word).replace("/workspace/", f"{ROOT}/") for word in (*trainer["command"], *trainer["args"])]
    pet = {"NNODES": str(nodes), "NPROC_PER_NODE": str(trainer["numProcPerNode"]), "MASTER_ADDR": "127.0.0.1"}
    pet |= {"MASTER_PORT": str(free_port())}
    pods = [
        launch(
            *words, *DIGITS, "steps=8", cwd=tmp_path,
            env={f"PET_{key}": value for key, value in (pet | {"NODE_RANK": str(rank)}).items()},
        )
        for rank in range(nodes)
    ]  # fmt: skip
    for pod in pods:
        assert pod.process.wait(HANG_SECONDS) == 0, pod.output
    assert f"mode: ddp, {nodes} processes on {nodes} machines" in pods[0].output
    assert left.weights(Runner(tmp_path)) == one_process(tmp_path / "one", "configs/digits.yaml", *DIGITS, "steps=8")
