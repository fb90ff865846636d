"""Two machines give the bits of one, tell what one of them lacks, and end in seconds when one is gone.

The slow tests have a real network between them: two network namespaces with a cable (veth), an `accelerate
launch` or torchrun in each. The others start what a launcher starts on each machine, on loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import left, made
from tests.conftest import HANG_SECONDS, ROOT, Finished, Launched, Runner, Running, free_port
from tests.tasks import texts
from tests.test_stopping import until

BIN = Path(sys.executable).parent
PORT = "29500"  # free: a namespace has ports of its own
SECONDS = 15  # in which the end of a process must end the others
SILENT_SECONDS = 60  # in which a machine that does not answer must
DIGITS = ("configs/digits.yaml", "parallel.device=cpu", "data.workers=1", "evaluate.every=0", "tracking.every=1")
LINEAR = "model.name=tests.spies_failure:Linear"
LONG = (*DIGITS, "steps=120", "checkpoint.every=5")

Launch = Callable[..., Launched]


@dataclass
class Machine:
    """A network namespace, whose processes see another network than this machine's, and the same disk."""

    name: str
    address: str
    disk: Runner
    launch: Launch

    @property
    def outputs(self) -> Path:
        return self.disk.outputs

    def start(self, *command: str, env: dict[str, str] | None = None) -> Launched:
        program = (str(shutil.which("ip")), "netns", "exec", self.name, str(BIN / command[0]))
        return self.launch(*program, *command[1:], env=env)

    def train(self, rank: int, main: Machine, *settings: str) -> Launched:
        """What README says to type on this machine."""
        file = ROOT / "configs" / "accelerate" / "two_nodes.yaml"
        place = ("--main_process_ip", main.address, "--machine_rank", str(rank))
        command = ("accelerate", "launch", "-q", "--config_file", str(file), *place)
        return self.start(*command, "train/main.py", *settings, f"run.output_dir={self.outputs}")

    def torchrun(self, main: Machine, *settings: str) -> Launched:
        """One or two machines, as many as there are."""
        elastic = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "1", "--rdzv-backend", "c10d")
        meeting = ("--rdzv-endpoint", f"{main.address}:{PORT}", "--local-addr", self.address)
        meeting += ("--rdzv-conf", f"is_host={int(self is main)},last_call_timeout=5")
        command = ("torchrun", *elastic, *meeting, "train/main.py", *settings, f"run.output_dir={main.outputs}")
        # Without the first a machine that comes back waits in vain for torch's own addresses.
        return self.start(*command, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "SPY_SECONDS": "0.05"})

    def kill(self) -> None:
        """Cut the power."""
        for pid in _ip("netns", "pids", self.name).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def unplug(self) -> None:
        """Let all that is sent to it or by it be lost, which nobody is told."""
        assert not _ip("-n", self.name, "link", "set", "eth0", "down").returncode


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def machines(launch: Launch, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines without a disk in common."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and the command ip (iproute2)")
    first, second = (
        Machine(f"lockstep-{os.getpid()}-{number}", f"10.77.0.{number}", Runner(tmp_path / f"disk-{number}"), launch)
        for number in (1, 2)
    )
    commands = [
        ["netns", "add", first.name],
        ["netns", "add", second.name],
        ["link", "add", "eth0", "netns", first.name, "type", "veth", "peer", "name", "eth0", "netns", second.name],
        *(["-n", one.name, "addr", "add", f"{one.address}/24", "dev", "eth0"] for one in (first, second)),
        *(["-n", one.name, "link", "set", device, "up"] for one in (first, second) for device in ("lo", "eth0")),
    ]
    try:
        for words in commands:
            if (done := _ip(*words)).returncode:
                pytest.skip(f"network namespaces are not permitted here: ip {' '.join(words)}: {done.stderr.strip()}")
        yield first, second
    finally:
        for one in (first, second):
            one.kill()
            _ip("netns", "del", one.name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The weights of the same run on one machine, in one process."""

    def weights(*settings: str) -> str:
        one = Runner(tmp_path_factory.mktemp("one"))
        finished = one.run(str(ROOT / settings[0]), *settings[1:])
        assert finished.code == 0, finished.output
        return left.weights(one)

    return weights


def checkpoint(outputs: Path, step: int) -> bool:
    return any(outputs.glob(f"*/checkpoints/step-{step:08d}"))


# --- over a network ---


@pytest.mark.slow
def test_two_machines_give_the_bits_of_one(machines: tuple[Machine, Machine], expected: Callable[..., str]) -> None:
    first, second = machines
    settings = (*DIGITS, "steps=12")
    both = [machine.train(rank, first, *settings) for rank, machine in enumerate(machines)]
    wanted = expected(*settings)
    for launched in both:
        assert launched.process.wait(HANG_SECONDS) == 0, launched.output
    assert "mode: ddp, 2 processes on 2 machines (num_processes: 2 (" in both[0].output
    assert left.weights(first.disk) == wanted
    assert not second.outputs.exists()


@pytest.mark.slow
def test_a_machine_that_lost_power_ends_the_other_and_both_go_on_from_the_last_checkpoint(
    machines: tuple[Machine, Machine], expected: Callable[..., str]
) -> None:
    first, second = machines
    both = [machine.train(rank, first, *LONG) for rank, machine in enumerate(machines)]
    until(lambda: checkpoint(first.outputs, 10), both[0])
    second.kill()
    assert both[0].process.wait(SECONDS) == 1
    told = "\n".join(both[0].output.splitlines()[-25:])
    assert f"the connection to a process on {second.address} is lost" in told, told
    assert "The same command on all machines goes on from the last checkpoint" in told

    both = [machine.train(rank, first, *LONG) for rank, machine in enumerate(machines)]
    for launched in both:
        assert launched.process.wait(HANG_SECONDS) == 0, launched.output
    assert "resuming: " in both[0].output
    assert left.weights(first.disk) == expected(*LONG)


@pytest.mark.slow
def test_an_interface_that_the_machines_do_not_share_is_told(
    machines: tuple[Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    both = [machine.train(rank, machines[0], *DIGITS, "steps=3") for rank, machine in enumerate(machines)]
    for launched in both:
        assert launched.process.wait(HANG_SECONDS) == 1
    told = both[0].output + both[1].output
    assert "the processes cannot reach each other" in told and "GLOO_SOCKET_IFNAME=eth0" in told, told


@pytest.mark.slow
def test_a_cut_cable_ends_both_machines(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    both = [machine.train(rank, first, *DIGITS, "steps=100000", "checkpoint.every=5") for rank, machine in enumerate(machines)]
    until(lambda: checkpoint(first.outputs, 10), both[0])
    second.unplug()
    for launched, other in zip(both, (f"a process on {second.address}", f"the main process on {first.address}"), strict=True):
        assert launched.process.wait(SILENT_SECONDS) == 1
        assert f"the connection to {other} is lost" in launched.output, launched.output


@pytest.mark.slow
def test_an_elastic_launcher_goes_on_with_the_machines_that_there_are(
    machines: tuple[Machine, Machine], expected: Callable[..., str]
) -> None:
    """Both, then the first alone, then both again: the bits are those of one process."""
    first, second = machines
    made.shards(first.disk.folder / "set", [13, 11])
    settings = (made.config(first.disk.folder), LINEAR, "steps=200", "checkpoint.every=5")
    one, _ = (machine.torchrun(first, *settings) for machine in machines)
    until(lambda: checkpoint(first.outputs, 10), one)
    second.kill()
    until(lambda: "mode: single, one process" in one.output, one)
    again = second.torchrun(first, *settings)
    for launched in (one, again):
        assert launched.process.wait(HANG_SECONDS) == 0, launched.output
    assert one.output.count("mode: ddp, 2 processes on 2 machines") == 2, one.output
    assert left.weights(first.disk) == expected(*settings)


# --- what each machine must have ---


class Pair:
    """The two processes that launchers would start on two machines, each with its own disk."""

    def __init__(self, folder: Path) -> None:
        self.machines = [Runner(folder / f"machine-{rank}") for rank in range(2)]
        for one in self.machines:
            one.folder.mkdir()
            made.shards(one.folder / "set", [13, 11])

    def start(self, *settings: str, second: tuple[str, ...] = ()) -> list[Running]:
        """The same settings on both, and more on the second."""
        both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        both |= {"MASTER_PORT": str(free_port()), "GROUP_WORLD_SIZE": "2"}
        for rank, one in enumerate(self.machines):
            one.environment |= both | {"RANK": str(rank)}
        return [
            one.start(made.config(one.folder), LINEAR, *settings, *(second if rank else ()))
            for rank, one in enumerate(self.machines)
        ]

    def run(self, *settings: str, second: tuple[str, ...] = ()) -> list[Finished]:
        return [running.end() for running in self.start(*settings, second=second)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_setting_that_only_one_machine_was_given_is_refused(pair: Pair) -> None:
    one, two = pair.run("steps=3", second=("optimizer.lr=0.2", "data.workers=1"))
    assert (one.code, two.code) == (2, 2)
    assert "process 1 was started with other settings" in one.output
    assert "optimizer.lr: 0.2, and 0.1 on the main process" in one.output
    assert "data.workers" not in one.output  # a machine's own affair


def test_machines_may_have_their_tokenizer_in_different_places(pair: Pair) -> None:
    text = texts.file(pair.machines[0].folder)
    files = [one.folder / "tokenizer.json" for one in pair.machines]
    for file in files:
        texts.tokenizer(file, text.read_text())
    settings = (
        "task=language_modeling",
        "model.name=tests.tasks.texts:Uniform",
        f"data.path={text}",
        "data.context=4",
        "steps=1",
    )
    ended = pair.run(*settings, f"data.tokenizer={files[0]}", second=(f"data.tokenizer={files[1]}",))
    assert [one.code for one in ended] == [0, 0], ended[0].output


def test_a_mistake_on_one_machine_ends_the_other_in_seconds(pair: Pair) -> None:
    began = time.monotonic()
    one, two = pair.run("steps=3", second=("optimizer.speed=0.2",))
    assert time.monotonic() - began < SECONDS + 15  # to start
    assert (one.code, two.code) == (1, 2)
    assert "the connection to a process on 127.0.0.1 is lost" in one.output
    assert "What is said there is the cause" in one.output


def test_other_data_on_one_machine_are_refused(pair: Pair) -> None:
    made.shards(pair.machines[1].folder / "set", [13, 13])
    one, two = pair.run("steps=3")
    assert (one.code, two.code) == (1, 1)
    assert "process 1 has other data" in one.output


def test_machines_without_a_common_disk_go_on_from_the_checkpoint_of_the_main_one(pair: Pair, train: Runner) -> None:
    made.shards(train.folder / "set", [13, 11])
    assert train.run(made.config(train.folder), LINEAR, "steps=6").code == 0
    assert [finished.code for finished in pair.run("steps=3", "checkpoint.every=1")] == [0, 0]
    assert not pair.machines[1].outputs.exists()
    one, two = pair.run("steps=6", "checkpoint.every=1")
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert "resuming: " in one.output and "step 3" in one.output
    assert left.weights(pair.machines[0]) == left.weights(train)


def test_a_run_whose_checkpoints_are_on_the_other_machine_does_not_start_anew(pair: Pair) -> None:
    assert [finished.code for finished in pair.run("steps=3", "checkpoint.every=1")] == [0, 0]
    pair.machines.reverse()
    one, two = pair.run("steps=6", "checkpoint.every=1")
    assert (one.code, two.code) == (1, 1)
    assert "process 1 has a checkpoint of step 3" in one.output and "the main process has none" in one.output


def test_a_killed_process_on_one_machine_ends_the_other(pair: Pair) -> None:
    for machine in pair.machines:
        machine.environment["SPY_SECONDS"] = "0.05"
    one, two = pair.start("steps=500")
    one.wait_for("step 3/")
    two.kill()
    began = time.monotonic()
    finished = one.end()
    assert time.monotonic() - began < SECONDS
    assert finished.code == 1
    assert "the connection to a process on 127.0.0.1 is lost (it has ended)" in finished.output


def test_a_network_interface_that_is_not_there_is_told(pair: Pair) -> None:
    for machine in pair.machines:
        machine.environment["GLOO_SOCKET_IFNAME"] = "nosuch0"
    one, _ = pair.run("steps=3")
    assert one.code == 1
    assert "the processes cannot reach each other" in one.output and "GLOO_SOCKET_IFNAME=eth0" in one.output, one.output
