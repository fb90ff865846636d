"""The configurations that come with the project are whole: names, arguments and all."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from train.run import load_config

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads(path: Path) -> None:
    config = load_config([path], [])
    assert config.run.name == path.stem.replace("_", "-")
