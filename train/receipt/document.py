"""The receipt as a file: sealed when it is written, checked when it is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from train.errors import UsageError

SCHEMA = 2
NAME = "receipt.json"
CHECKOUT = "{checkout}"  # stands for the folder of the code in the paths of a receipt
_KEYS = {"run", "config", "places", "data", "lanes", "steps", "environments", "starts", "trace", "checkpoints", "result"}

Receipt = dict[str, Any]


def sealed(receipt: Receipt) -> str:
    """The text of a receipt, with the digest of its content."""
    content = {"schema": SCHEMA, **receipt}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


def read(path: Path) -> Receipt:
    """A receipt, or the one in a run's folder. UsageError where it is not whole or of another schema."""
    file = path / NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not a whole receipt: {error}. Ask for the file again.") from error
    if not isinstance(content, dict) or "schema" not in content:
        raise UsageError(f"{file} is no receipt: it has no `schema`")
    if content["schema"] != SCHEMA:
        raise UsageError(
            f"{file} has schema {content['schema']}, and this program reads {SCHEMA}: take the program that wrote it"
        )
    seal = content.pop("sha256", None)
    if seal != _digest(content) or content.keys() - {"schema"} != _KEYS:
        raise UsageError(f"{file} is not as it was written: its content does not have the digest at its end")
    return content


def _digest(content: Receipt) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
