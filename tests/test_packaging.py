"""What is shipped and what is pinned."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DECLARED = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
OPTIONAL = [Requirement(line) for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
DEVELOPMENT = [Requirement(line) for line in PROJECT["dependency-groups"]["dev"]]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def wheel(folder: Path) -> zipfile.ZipFile:
    """Build the wheel of the project in `folder`, as pip and uv do."""
    build = "import uv_build; print(uv_build.build_wheel('.'))"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where the backend looks for its program
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    return zipfile.ZipFile(folder / built.stdout.split()[-1])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the wheel is made of."""
    shutil.copytree(ROOT / "train", tmp_path / "train", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_wheel_holds_the_code_the_digits_and_the_licence(project: Path) -> None:
    with wheel(project) as built:
        names = [name for name in built.namelist() if not name.endswith("/")]
    [licence] = [name for name in names if name.endswith("/LICENSE")]
    assert re.fullmatch(r"lockstep-[\d.]+\.dist-info/licenses/LICENSE", licence)
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == {str(file.relative_to(project)) for file in (project / "train").rglob("*") if file.is_file()}
    assert sum(name.startswith("train/data/digits/") and name.endswith(".parquet") for name in shipped) == 5


def test_a_fork_renames_itself_in_one_place(project: Path) -> None:
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(text.replace('name = "lockstep"', 'name = "my-project"'))
    with wheel(project) as built:
        names = built.namelist()
    assert "train/main.py" in names
    assert not [name for name in names if "lockstep" in name]


def test_every_library_that_the_code_imports_is_declared() -> None:
    """Those that only come along with another library may leave with its next version."""
    imported = set()
    for file in (ROOT / "train").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    distributions = packages_distributions()
    third_party = imported - set(sys.stdlib_module_names) - {"train", "pydantic_core"}  # pydantic's other half, which it pins
    declared = {canonicalize_name(requirement.name) for requirement in [*DECLARED, *OPTIONAL]}
    assert {"torch", "yaml", "datasets"} <= third_party
    assert not [name for name in third_party if declared.isdisjoint(map(canonicalize_name, distributions[name]))]


def test_the_lock_pins_every_package_by_hash_and_names_no_address() -> None:
    assert not re.search(r"://|--index|--extra|--find|--trusted|@", LOCK)
    entries = re.split(r"\n(?=\S)", LOCK.strip())
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+( ; [^\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+$", entry), entry


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_has_what_the_project_asks_for(python: str) -> None:
    pinned = {}
    for line in re.findall(r"^([a-z0-9].*?) \\$", LOCK, re.MULTILINE):
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate({"python_full_version": f"{python}.9"}):
            pinned[canonicalize_name(pin.name)] = next(iter(pin.specifier)).version
    for requirement in (*DECLARED, *OPTIONAL, *DEVELOPMENT):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    made = subprocess.run(["make", "test", "PYTHON=/no/such/python"], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2
    assert made.stderr.startswith("Lockstep needs Python 3.11 or 3.12; /no/such/python is neither or is missing."), made.stderr
    assert not (tmp_path / ".venv").exists()
