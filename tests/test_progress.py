"""What a person sees of a run, on a terminal and in a file."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train

PREAMBLE = """
import sys, time
from train.progress import Progress
VALUES = {"loss": 0.5, "lr": 0.001, "samples_per_second": 12345.6, "data_wait": 0.034, "memory_gib": 12.34}
"""
RUN = """
progress = Progress(total_steps=40, start_step=10)
progress.line("loading [data] from /a/b")
for step in range(11, 41):
    progress.update(step, VALUES if step % 10 == 0 else None)
    time.sleep(0.02)
    if step == 20:
        print("a warning", file=sys.stderr)
progress.close()
print("the summary")
"""
COST = """
progress = Progress(total_steps=1_000_000)
progress.update(1)
start = time.perf_counter()
for step in range(2, 100_002):
    progress.update(step)
microseconds = (time.perf_counter() - start) / 100_000 * 1e6
progress.close()
print(microseconds)
"""
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")},
    "PYTHONPATH": str(Path(train.__file__).parents[1]),
    "TERM": "xterm",
    "COLUMNS": "200",
}


def on_terminal(script: str, **environment: str) -> tuple[str, str]:
    """What a script writes to a terminal that is its stderr, and to a pipe that is its stdout."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**ENVIRONMENT, **environment},
        text=True,
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
        os.close(ours)
        stdout = process.communicate(timeout=60)[0]
    assert process.returncode == 0, shown
    return shown.decode(), stdout


def piped(script: str, **environment: str) -> tuple[str, str]:
    process = subprocess.run(
        [sys.executable, "-c", PREAMBLE + script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**ENVIRONMENT, **environment},
        text=True,
        timeout=60,
        check=True,
    )
    return process.stderr, process.stdout


def rows(shown: str) -> list[list[str]]:
    """The rows of a terminal, each as the texts that stood there one after the other."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    return [[state for state in row.split("\r") if state] for row in text.split("\n")]


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_in_a_pipe_each_logged_step_is_one_plain_line(environment: dict[str, str]) -> None:
    stderr, stdout = piped(RUN, **environment)
    lines = stderr.splitlines()
    assert [re.sub(r"ETA \S+", "ETA", line) for line in lines] == [
        "loading [data] from /a/b",
        "step 20/40  50%  ETA  loss 0.5000  lr 0.001  12,346 samples/s  data wait 3%  memory 12.3 GiB",
        "a warning",
        "step 30/40  75%  ETA  loss 0.5000  lr 0.001  12,346 samples/s  data wait 3%  memory 12.3 GiB",
        "step 40/40  100%  ETA  loss 0.5000  lr 0.001  12,346 samples/s  data wait 3%  memory 12.3 GiB",
    ]
    assert "\r" not in stderr and "\x1b" not in stderr
    assert stdout == "the summary\n"


def test_a_dumb_terminal_gets_plain_lines() -> None:
    shown, _ = on_terminal(RUN, TERM="dumb")
    assert "\x1b" not in shown
    assert [line.split("  ")[0] for line in shown.splitlines() if line.startswith("step")] == [
        "step 20/40",
        "step 30/40",
        "step 40/40",
    ]


def test_on_a_terminal_one_line_changes_and_messages_stand_above_it() -> None:
    shown, stdout = on_terminal(RUN)
    terminal = [row for row in rows(shown) if row]
    assert [row[-1] for row in terminal[:2]] == ["loading [data] from /a/b", "a warning"]
    assert len(terminal) == 3  # two messages and the line
    states = [state for row in terminal for state in row if state.startswith("step")]
    assert len(set(states)) >= 3
    assert states[-1].startswith("step 40/40  100%")
    assert states[-1].endswith("loss 0.5000  lr 0.001  12,346 samples/s  data wait 3%  memory 12.3 GiB")
    assert stdout == "the summary\n"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is given back


def test_on_a_terminal_the_line_changes_at_most_four_times_a_second() -> None:
    shown, _ = on_terminal("""
progress = Progress(total_steps=10_000)
start = time.monotonic()
step = 0
while time.monotonic() - start < 1:
    step += 1
    progress.update(step, VALUES)
    time.sleep(0.001)
progress.close()
""")
    assert 4 <= len({state for row in rows(shown) for state in row}) <= 6  # 4 in the second, the first and the last


def test_a_narrow_terminal_shows_one_row_cut_at_its_end() -> None:
    shown, _ = on_terminal(RUN, COLUMNS="40")
    states = [state for row in rows(shown) for state in row if state.startswith("step")]
    assert max(map(len, states)) <= 40
    assert states[-1].startswith("step 40/40  100%  ETA")
    assert states[-1].endswith("…")


def test_the_time_left_is_that_of_the_steps_left_at_the_speed_of_the_steps_done() -> None:
    stderr, _ = piped("""
progress = Progress(total_steps=1000, start_step=500)
progress.update(501)
for step in range(502, 512):
    time.sleep(0.05)
    progress.update(step, VALUES if step == 511 else None)
""")
    (seconds,) = re.findall(r"ETA 0:00:(\d\d)", stderr)
    assert 24 <= int(seconds) <= 32  # 489 steps of 0.05 s are 24.5 s; a busy machine sleeps longer


@pytest.mark.parametrize("run", [piped, on_terminal])
def test_an_update_that_draws_nothing_costs_less_than_20_microseconds(run: object) -> None:
    assert callable(run)
    assert float(run(COST)[1]) < 20


def test_an_end_in_the_middle_gives_the_terminal_its_cursor_back() -> None:
    """As after an error, when nothing closes the line."""
    shown, _ = on_terminal("from train.ending import leave\nProgress(total_steps=9).update(1)\nleave(0)\n")
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
