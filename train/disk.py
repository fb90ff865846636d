"""What a disk that refuses a save means for a person."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path


def refusal(error: OSError, final: Path, needed: int) -> str:
    there = next(parent for parent in final.parents if parent.is_dir())
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            mend = "Make room there, or choose another run.output_dir or a lower checkpoint.keep"
        case errno.EFBIG:
            mend = "Raise the limit on a file's size (ulimit -f)"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            mend = "Make the folder writable, or choose another run.output_dir"
        case errno.ENOENT | errno.ENOTDIR | errno.EEXIST:
            mend = "The run's folder was removed or replaced while the run was using it: put it back"
        case _:
            mend = "Check the disk"
    return (
        f"cannot save {final}: {error.strerror}.\n"
        f"It needs {needed / 1e6:,.1f} MB; {shutil.disk_usage(there).free / 1e6:,.1f} MB are free in {there}. "
        "Older checkpoints are as they were.\n"
        f"{mend}; then type the same command again."
    )
