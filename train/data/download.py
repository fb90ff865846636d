"""One file from an http(s) address, kept in the cache of `datasets` under the version that the server tells."""

from __future__ import annotations

import hashlib
import shutil
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from train.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT = 30  # seconds without a byte
CACHE_REFUSED = "the cache of datasets cannot be written ({}); set HF_HOME to a folder that can"


def download(url: str, say: Callable[[str], None]) -> str:
    """The path of the file at `url`, downloaded unless this version of it is there. Raises RunError."""
    from datasets.config import DOWNLOADED_DATASETS_PATH
    from filelock import FileLock

    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            version = [url, answer.headers.get("ETag"), answer.headers.get("Last-Modified"), answer.headers.get("Content-Length")]
            folder = Path(DOWNLOADED_DATASETS_PATH) / hashlib.sha256(repr(version).encode()).hexdigest()[:32]
            file = folder / (unquote(PurePosixPath(urlsplit(url).path).name) or "file")
            part = file.with_name(file.name + ".part")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with FileLock(folder / "lock"):  # the processes of a run ask together
                    if not file.exists():
                        say(f"downloading {url} ({version[3] or 'unknown'} bytes)")
                        with part.open("wb") as written:
                            shutil.copyfileobj(answer, written, 1 << 20)
                        if version[3] not in (None, str(part.stat().st_size)):
                            raise RunError(f"{url}: the download broke off after {part.stat().st_size} of {version[3]} bytes")
                        part.replace(file)
            except OSError as error:
                if error.filename is None:
                    raise
                raise RunError(CACHE_REFUSED.format(error)) from None
    except urllib.error.HTTPError as error:
        raise RunError(f"{url}: the server answers {error.code} {error.reason}") from None
    except OSError as error:
        raise RunError(f"{url}: cannot be downloaded: {getattr(error, 'reason', error)}") from None
    return str(file)
