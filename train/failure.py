"""How a run that fails says why: to the person on stderr, to the launcher in its error file, and by its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

from train.errors import LockstepError, UsageError

_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|socket closed|broken pipe|recvValue failed|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
_NO_WAY = re.compile("connectFullMesh|Unable to find (address|interface)")  # gloo's
_WORKER_GONE = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: (\w[\w ]*)|exited)")
_WORKER_MENDS = (
    "Mostly that is too little memory, which the kernel's log tells (dmesg). Lower data.workers or data.prefetch, or give the "
    "container more (--memory)."
)
_PEER_SECONDS = 2.0  # in which the process that failed first can say why


def tell(error: Exception, *, debug: bool) -> int:
    """Say what went wrong, once where all processes know it, and give the exit code."""
    rank = os.environ.get("RANK", "0")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    silent = False
    if isinstance(error, LockstepError):
        text = str(error)
        alone = os.environ.get("LOCAL_RANK", "0") == "0"  # of its machine; a mistake in settings may be one machine's
        silent = rank != "0" and (error.everywhere or (isinstance(error, UsageError) and not alone))
    elif several and isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)):
        time.sleep(_PEER_SECONDS)
        text = "another process has ended, so this one ends too; what that process or the launcher says is the cause"
    elif _NO_WAY.search(str(error)):
        text = (
            f"the processes cannot reach each other: {error}\nAll ports must be open between the machines, and the network "
            "interface must be one that they share; name it on each of them: GLOO_SOCKET_IFNAME=eth0"
        )
    elif worker := _WORKER_GONE.search(f"{error.__cause__} {error}"):  # the cause knows the signal
        text = f"data worker {worker[1]} has died ({worker[2] or 'it exited'}). {_WORKER_MENDS}"
    elif isinstance(error, (ConnectionResetError, ConnectionRefusedError, EOFError)):  # seen in its socket first
        text = f"a data worker has died. {_WORKER_MENDS}"
    else:
        text = f"{type(error).__name__}: {error}\n(unexpected; --debug shows where)"
    if not silent:
        if debug:
            traceback.print_exception(error)
        print(f"{f'[process {rank}] ' if several else ''}error: {text}", file=sys.stderr, flush=True)
    tell_launcher(text)
    return error.exit_code if isinstance(error, LockstepError) else 1


def tell_launcher(text: str) -> None:
    """Let torchrun's last words, which are also those of `accelerate launch` with several processes, be ours."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")
