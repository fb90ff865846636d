"""Several machines: how their processes reach each other, and how those that are left end when others are gone.

Collectives wait half an hour for a machine that has lost its power or its network, and as long for a first connection to a
process that has refused its settings. So each process holds a connection to the main one, on which nothing is said but a
farewell at the end; it breaks when either side ends otherwise, and the kernel breaks it when the other machine is silent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from train import failure
from train.errors import RunError

_KEY = "lockstep/machines"  # in torch's store: the port and the password of the main process
_JOIN_SECONDS = 600.0  # for all to have started
_SILENCE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # 30 s without an answer of the other kernel
_GRACE_SECONDS = 1.0  # in which the main thread can tell a cause of its own
_FAREWELL = b"."
_SIOCGIFADDR = 0x8915

_held: list[Any] = []  # torch's store, which may live in this process
_lines: list[socket.socket] = []
_last_things: list[Callable[[], None]] = []


def join() -> None:
    """Where the processes are on several machines, connect them. The first thing that they do, so that none waits in vain."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", processes)) == processes:
        return
    import torch.distributed as dist

    store, rank, _ = next(dist.rendezvous("env://"))
    _held.append(store)
    lines = _accept(store, processes - 1) if rank == 0 else _connect(store)
    for line in lines:
        if name := _interface(line):  # gloo would take that of the host's name, which on many machines is loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _SILENCE.items():
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    _lines.extend(lines)
    threading.Thread(target=_watch, args=(lines,), daemon=True).start()


def leave() -> None:
    """Say that this process ends as it should."""
    for line in _lines:
        with contextlib.suppress(OSError):
            line.sendall(_FAREWELL)


def _accept(store: Any, count: int) -> dict[socket.socket, str]:
    """A connection from each other process, and where it is."""
    password = secrets.token_hex(16)
    lines: dict[socket.socket, str] = {}
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=count) as listener:
        store.set(_KEY, f"{listener.getsockname()[1]} {password}")
        listener.settimeout(_JOIN_SECONDS)
        while len(lines) < count:
            try:
                line, address = listener.accept()
            except TimeoutError:
                raise RunError(f"only {len(lines)} of {count} other processes have come in {_JOIN_SECONDS:.0f} s") from None
            line.settimeout(5)
            with contextlib.suppress(OSError):
                if line.recv(len(password), socket.MSG_WAITALL).decode(errors="replace") == password:  # else it is a stranger
                    line.sendall(_FAREWELL)
                    lines[line] = f"a process on {address[0].removeprefix('::ffff:')}"
    return lines


def _connect(store: Any) -> dict[socket.socket, str]:
    """The connection to the main process."""
    address, deadline = os.environ["MASTER_ADDR"], time.monotonic() + _JOIN_SECONDS
    while True:
        port, password = store.get(_KEY).decode().split()
        try:
            line = socket.create_connection((address, int(port)), timeout=5)
            line.sendall(password.encode())
            if line.recv(1) == _FAREWELL:
                return {line: f"the main process on {address}"}
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"the main process on {address} cannot be reached ({error}); are all ports open?") from error
        time.sleep(0.2)  # an elastic launcher's store still has the port of before a restart


def _watch(lines: dict[socket.socket, str]) -> None:
    """Wait for the end of each connection, and end this process with the first that ends without a farewell."""
    selector = selectors.DefaultSelector()
    for line, who in lines.items():
        selector.register(line, selectors.EVENT_READ, (line, who))
    while selector.get_map():
        for key, _ in selector.select():
            line, who = key.data
            try:
                farewell, reason = line.recv(1), "it has ended"
            except OSError as error:
                farewell, reason = b"", str(error.strerror)
            if not farewell:
                _end(who, reason)
            selector.unregister(line)


def before_end(finish: Callable[[], None]) -> None:
    """What this process must still do when the others are gone; it must not take long."""
    _last_things.append(finish)


def _end(who: str, reason: str) -> None:
    time.sleep(_GRACE_SECONDS)
    for finish in _last_things:
        finish()
    text = (
        f"the connection to {who} is lost ({reason}), so this process ends too. What is said there is the cause; where nothing "
        "is, that machine or its network is down. The same command on all machines goes on from the last checkpoint."
    )
    print(f"[process {os.environ['RANK']}] error: {text}", file=sys.stderr, flush=True)
    failure.tell_launcher(text)
    os._exit(1)


def _interface(line: socket.socket) -> str | None:
    """The network interface of a connection between two machines; None where it is loopback, or has no IPv4 address."""
    address = line.getsockname()[0].removeprefix("::ffff:")
    if address.startswith("127.") or ":" in address:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                if fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == socket.inet_aton(address):
                    return name
    return None
