"""Where a run's numbers go, and that no tracker can cost the run."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

import train
from train.errors import UsageError
from train.tracking import FINISH_SECONDS, INIT_SECONDS, Metrics, resolve, rewind

KEY = "0123456789abcdef0123456789abcdef01234567"  # of the right form, and nobody's


@dataclass
class Tracking:
    wandb: Literal["off", "auto", "online", "offline"] = "off"
    tensorboard: bool = False
    project: str = "lockstep"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# metrics.jsonl


def test_metrics_read_back_bit_for_bit_while_the_run_goes_on(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    values = {"train/loss": 0.1 + 0.2, "train/lr": 5e-324, "train/seconds": 1 / 3}
    metrics.log(120, values)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 120, **values}]  # before close: a crash loses no step


def test_values_that_are_not_finite_are_json_that_float_reads(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log(1, {"nan": math.nan, "high": math.inf, "low": -math.inf})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(line["nan"]))
    assert (float(line["high"]), float(line["low"])) == (math.inf, -math.inf)


@pytest.mark.parametrize("torn", ["", '{"step": 9, "train/lo', '{"step": 3', '{"step": 5, "train/loss": 0.5}', "\0\0\0"])
def test_after_a_crash_and_a_resume_each_step_stands_once_with_the_values_that_survived(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path)
    for step in range(1, 9):
        first.log(step, {"train/loss": -1.0 if step > 5 else 1 / step})
        if step == 5:
            first.log(step, {"validation/accuracy": 0.75})
    with path.open("a") as file:
        file.write(torn)  # what a kill leaves of a line

    rewind(path, 5, 5)
    second = Metrics(path)
    for step in range(6, 13):
        second.log(step, {"train/loss": 1 / step})

    trained = [line for line in lines(path) if "train/loss" in line]
    assert trained == [{"step": step, "train/loss": 1 / step} for step in range(1, 13)]
    assert [line for line in lines(path) if line not in trained] == [{"step": 5, "validation/accuracy": 0.75}]
    assert list(tmp_path.iterdir()) == [path]


def test_an_evaluation_that_the_checkpoint_does_not_know_is_made_again_and_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step, name in ((4, "train/loss"), (4, "validation/loss"), (8, "train/loss"), (8, "validation/loss")):
        metrics.log(step, {name: 1.0})
    rewind(path, 8, 4)
    assert [(line["step"], *line.keys()) for line in lines(path)] == [
        (4, "step", "train/loss"),
        (4, "step", "validation/loss"),
        (8, "step", "train/loss"),
    ]


def test_a_run_that_starts_anew_forgets_the_steps_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rewind(path, -1, -1)  # no file yet
    metrics = Metrics(path)
    metrics.log(0, {"validation/accuracy": 0.1})
    rewind(path, -1, -1)
    assert path.read_text() == ""


# Which trackers a run has


@pytest.fixture
def wandb_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A person who has never used W&B; set what this one has."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    import wandb

    wandb.teardown()  # it reads the environment once
    yield monkeypatch
    wandb.teardown()


def resolved(tracking: Tracking, run_dir: Path) -> tuple[list[str], list[str]]:
    """The modes of the trackers that are opened, and the notes."""
    trackers = resolve(tracking, run_dir)
    assert not run_dir.exists()
    return [next(iter(getattr(tracker, "modes", [tracker]))) for tracker in trackers.log_with], trackers.notes


@pytest.mark.usefixtures("wandb_environment")
def test_without_a_key_auto_is_offline_with_one_line_that_tells_how_to_upload(tmp_path: Path) -> None:
    modes, (note,) = resolved(Tracking("auto"), tmp_path / "my run")
    assert modes == ["offline"]
    assert f"wandb sync '{tmp_path}/my run/wandb'/offline-run-*" in note
    assert "no W&B key" in note and "\n" not in note


def test_a_key_makes_auto_online_whether_it_is_in_the_environment_or_in_netrc(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb_environment.setenv("WANDB_API_KEY", KEY)
    assert resolved(Tracking("auto"), tmp_path / "run") == (["online"], [])
    wandb.teardown()
    wandb_environment.delenv("WANDB_API_KEY")
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    assert resolved(Tracking("online"), tmp_path / "run") == (["online"], [])


@pytest.mark.usefixtures("wandb_environment")
def test_online_without_a_key_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tracking\.wandb is online.*WANDB_API_KEY.*wandb login.*auto, offline or off"):
        resolve(Tracking("online"), tmp_path / "run")


@pytest.mark.parametrize("asked", ["auto", "online", "offline"])
def test_wandb_mode_in_the_environment_is_respected_and_said(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, asked: Literal["auto", "online", "offline"]
) -> None:
    import wandb

    wandb_environment.setenv("WANDB_API_KEY", KEY)
    for mode, trackers in {"disabled": [], "offline": ["offline"]}.items():
        wandb_environment.setenv("WANDB_MODE", mode)
        modes, (note,) = resolved(Tracking(asked), tmp_path / "run")
        assert modes == trackers
        assert "WANDB_MODE" in note
        wandb.teardown()


def test_empty_variables_are_as_good_as_none(tmp_path: Path, wandb_environment: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        wandb_environment.setenv(name, "")
    assert resolved(Tracking("auto"), tmp_path / "run")[0] == ["offline"]


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "ofline"), ("WANDB_API_KEY", "too-short-a-key")])
def test_a_setting_that_wandb_refuses_is_a_usage_error_that_shows_no_key(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    wandb_environment.setenv(name, value)
    with pytest.raises(UsageError) as refusal:
        resolve(Tracking("auto"), tmp_path / "run")
    assert name.removeprefix("WANDB_").lower() in str(refusal.value).lower()
    assert "tracking.wandb=off" in str(refusal.value)
    assert value not in str(refusal.value)


@pytest.mark.usefixtures("wandb_environment")
def test_all_that_is_wrong_with_the_trackers_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # Python's own way to make a module absent
    with pytest.raises(UsageError, match=r"(?s)no W&B key.*pip install tensorboard.*lockstep\[tensorboard\]"):
        resolve(Tracking("online", tensorboard=True), tmp_path / "run")


# A run with trackers, each in a process of its own

JOB = """
import os, signal, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from train import tracking

first, last, wandb, tensorboard, run_id, at_the_end = sys.argv[1:]
run_dir = Path("run")
say = lambda text: print(text, file=sys.stderr, flush=True)
trackers = tracking.resolve(SimpleNamespace(wandb=wandb, tensorboard=bool(tensorboard), project="lockstep"), run_dir)
print("wandb imported:", "wandb" in sys.modules)
for note in trackers.notes:
    say(note)
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with=trackers.log_with or None, project_dir=run_dir)
start = time.monotonic()
step = int(first) - 1
run_id = tracking.start(accelerator, trackers, config={"optimizer": {"lr": 0.1}}, wandb_id=run_id or None, step=step, say=say)
print("id:", run_id)
print("start:", time.monotonic() - start)
for step in range(int(first), int(last) + 1):
    accelerator.log({"train/loss": 1 / step}, step=step)
    if at_the_end == "kill the service" and step == int(last) // 2:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        for child in map(int, children):
            if "wandb-core" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
print("logged:", time.monotonic(), flush=True)
if "wait" in at_the_end:
    sys.stdin.read(1)
if at_the_end == "die":
    time.sleep(3)  # the service writes once a second
    os.kill(os.getpid(), signal.SIGKILL)
if "no finish" not in at_the_end:
    accelerator.end_training()
"""


@dataclass
class Job:
    stderr: list[str]
    said: dict[str, str]
    code: int
    exit_seconds: float  # from the last logged step to the end of the process


def environment(home: Path, **variables: str) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and name != "NETRC"}
    return {**inherited, "HOME": str(home), "PYTHONPATH": str(Path(train.__file__).parents[1]), **variables}


def run_job(
    folder: Path,
    first: int = 1,
    last: int = 6,
    *,
    wandb: str = "off",
    tensorboard: bool = False,
    run_id: str = "",
    at_the_end: str = "",
    **variables: str,
) -> Job:
    process = subprocess.run(
        [sys.executable, "-c", JOB, str(first), str(last), wandb, "yes" * tensorboard, run_id, at_the_end],
        cwd=folder,
        env=environment(folder / "home", **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    ended = time.monotonic()
    said = dict(line.split(": ", 1) for line in process.stdout.splitlines())
    return Job(process.stderr.splitlines(), said, process.returncode, ended - float(said.get("logged", "nan")))


def offline_runs(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("run/wandb/offline-run-*"))


def test_without_wandb_it_is_not_even_imported(tmp_path: Path) -> None:
    job = run_job(tmp_path)
    assert (job.code, job.stderr, job.said["wandb imported"]) == (0, [], "False")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tensorboard_shows_each_step_once_after_a_crash_and_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_job(tmp_path, 1, 8, tensorboard=True, at_the_end="die").code == -signal.SIGKILL
    assert run_job(tmp_path, 6, 12, tensorboard=True).code == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))


class WandBServer(ThreadingHTTPServer):
    """As much of W&B's server as its client needs to upload a run."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _WandBHandler)
        self.answers = True
        self.history: list[tuple[str, dict[str, Any]]] = []  # (run id, line), in the order of arrival
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _WandBHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandBServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        while not self.server.answers:
            time.sleep(0.1)
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            request = json.loads(body)
            answer = {"data": self._graphql(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history += [(self.path.split("/")[-2], json.loads(line)) for line in history]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            project = {"id": "p", "name": "lockstep", "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": "run", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {"model": None}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[WandBServer]:
    with WandBServer() as server:
        yield server
        server.answers = True
        server.shutdown()


@pytest.mark.slow
def test_a_resume_goes_on_in_the_same_wandb_run_and_no_repeated_step_is_lost(tmp_path: Path, server: WandBServer) -> None:
    crashed = run_job(tmp_path, 1, 8, wandb="auto", at_the_end="die")
    resumed = run_job(tmp_path, 6, 12, wandb="auto", run_id=crashed.said["id"])
    assert (crashed.code, resumed.code) == (-signal.SIGKILL, 0)
    assert len(resumed.stderr) == 1  # offline, and how to upload
    runs = offline_runs(tmp_path)
    assert [run.split("-")[-1] for run in runs] == [crashed.said["id"]] * 2

    # The command of that line, given to W&B itself.
    command = resumed.stderr[0].split("with: ")[1].split(" (")[0]
    subprocess.run(
        f"{Path(sys.executable).parent}/{command}",
        shell=True,
        check=True,
        cwd=tmp_path,
        env=environment(tmp_path / "home", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url, WANDB_ERROR_REPORTING="false"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert {run_id for run_id, _ in server.history} == {crashed.said["id"]}
    assert {line["step"] for _, line in server.history} == set(range(1, 13))
    assert [line["train/loss"] for _, line in server.history if line["step"] == 12] == [1 / 12]


@pytest.mark.slow
def test_online_values_arrive_with_our_step_and_the_key_is_in_no_file(tmp_path: Path, server: WandBServer) -> None:
    job = run_job(tmp_path, 1, 6, wandb="online", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert job.code == 0
    assert job.stderr == [f"W&B: {server.url}/someone/lockstep/runs/{job.said['id']}"]
    assert [(line["step"], line["train/loss"]) for _, line in server.history] == [(step, 1 / step) for step in range(1, 7)]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(listening.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["silent", "refusing"])
def test_a_dead_network_costs_a_bounded_wait_and_the_run_is_recorded_offline(
    tmp_path: Path, silent_port: int, network: str
) -> None:
    port = silent_port if network == "silent" else 9
    job = run_job(tmp_path, wandb="online", WANDB_API_KEY=KEY, WANDB_BASE_URL=f"http://127.0.0.1:{port}")
    assert job.code == 0
    assert float(job.said["start"]) < INIT_SECONDS
    assert job.exit_seconds < 10
    (line,) = job.stderr
    assert "recording offline" in line and "wandb sync run/wandb/offline-run-*" in line
    assert len(offline_runs(tmp_path)) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.parametrize("at_the_end", ["wait", "wait, no finish"])
def test_a_network_that_dies_during_the_run_delays_its_end_by_a_bounded_wait(
    tmp_path: Path, server: WandBServer, at_the_end: str
) -> None:
    arguments = ["1", "6", "online", "", "", at_the_end]
    with subprocess.Popen(
        [sys.executable, "-c", JOB, *arguments],
        cwd=tmp_path,
        env=environment(tmp_path / "home", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("logged: "):
            assert process.poll() is None
        server.answers = False
        start = time.monotonic()
        _, stderr = process.communicate("x", timeout=120)
    assert process.returncode == 0
    assert 1 < time.monotonic() - start < FINISH_SECONDS + 8  # a process that ends takes some seconds as it is
    if at_the_end == "wait":
        assert "W&B did not finish" in stderr.splitlines()[1]
        assert "wandb sync run/wandb/run-*" in stderr.splitlines()[1]


@pytest.mark.slow
def test_a_killed_wandb_service_does_not_stop_the_run(tmp_path: Path) -> None:
    job = run_job(tmp_path, wandb="offline", at_the_end="kill the service")
    assert job.code == 0
    assert len(job.stderr) == 2  # how to upload, and:
    assert job.stderr[1].startswith("W&B stopped at step ")
    assert job.exit_seconds < 10
