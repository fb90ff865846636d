"""What the fork server has ready: the libraries, imported once, and none of their state started."""

from __future__ import annotations

import importlib
import os
import signal
import sys

for name in ("accelerate", "datasets", "torch", "torch._dynamo", "torchcodec.decoders", "torchvision"):
    importlib.import_module(name)


def run_main(arguments: list[str], environment: dict[str, str], log: str, folder: str) -> None:
    """Be a fresh process that runs `train/main.py ARGUMENTS` in `folder`, its output going to `log`."""
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    sys.argv = ["train/main.py", *arguments]
    from train.main import main

    main()
