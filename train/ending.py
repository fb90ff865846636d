"""How a process of the product ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from train.progress import show_cursor


def leave(code: int) -> NoReturn:
    """End at once. Threads that read ahead and collectives that wait for a failed process would keep this one, and Arrow's
    threads, when they close a file while Python ends, would abort it."""
    show_cursor()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
