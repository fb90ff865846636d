"""Configurations as a person writes them: real files in a folder of their own, and settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.config import Config, load
from train.errors import UsageError

NEEDED = "data: {path: org/name}\nmodel: {name: tiny}\nbatch: {size: 8}\nsteps: 10\n"

Load = Callable[..., Config]
Refuse = Callable[..., list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file `needed.yaml` of the keys that have no default."""
    (tmp_path / "needed.yaml").write_text(NEEDED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def read(folder: Path) -> Load:
    """Loads needed.yaml, `text` as my.yaml over it, and the settings."""

    def read(text: str = "", *overrides: str, **rest: Any) -> Config:
        (folder / "my.yaml").write_text(text or "{}")
        return load([Path("needed.yaml"), Path("my.yaml")], overrides, **rest)[0]

    return read


@pytest.fixture
def refused(read: Load) -> Refuse:
    """The lines in which the configuration is refused."""

    def refused(text: str = "", *overrides: str, **rest: Any) -> list[str]:
        with pytest.raises(UsageError) as error:
            read(text, *overrides, **rest)
        return str(error.value).splitlines()

    return refused
