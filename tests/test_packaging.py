"""What is shipped, and that the scripts do what the README promises of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import flashinfer_cascade
from flashinfer_cascade.native import load_core

ROOT = Path(__file__).resolve().parents[1]
CORE = "flashinfer_cascade/_core.so"
SCRIPTS = [".ci/run", "scripts/check", "scripts/demo", "scripts/setup", "scripts/test"]


@pytest.fixture(scope="module")
def distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("flashinfer-cascade")
    except metadata.PackageNotFoundError:
        pytest.fail("these tests look at the installed package: run them with scripts/test", pytrace=False)


@pytest.fixture(scope="module")
def shipped(distribution: metadata.Distribution) -> set[str]:
    return {path.as_posix() for path in distribution.files or ()}


def commands(script: str) -> set[str]:
    """The lines of a script that are not comments, without their indentation."""
    return {line.strip() for line in (ROOT / script).read_text().splitlines() if not line.startswith("#")}


def test_the_installed_package_is_the_one_under_test(distribution: metadata.Distribution) -> None:
    tested = Path(flashinfer_cascade.__file__).resolve()
    assert tested == Path(str(distribution.locate_file("flashinfer_cascade/__init__.py"))).resolve()
    assert tested.parent.parent != ROOT


def test_version_is_the_metadata_s(distribution: metadata.Distribution) -> None:
    # tomllib is not in Python 3.10.
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert flashinfer_cascade.__version__ == distribution.version == declared[1]


def test_every_file_of_the_package_is_shipped(shipped: set[str]) -> None:
    files = [path for path in (ROOT / "flashinfer_cascade").rglob("[!.]*") if path.is_file()]
    expected = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts} - {CORE}
    assert "flashinfer_cascade/py.typed" in expected
    assert expected <= shipped


def test_the_native_core_is_built_where_there_is_a_compiler(shipped: set[str]) -> None:
    assert (CORE in shipped) == (load_core() is not None) == (shutil.which("cc") is not None)


def test_licence_is_shipped(shipped: set[str]) -> None:
    assert any(path.endswith(".dist-info/licenses/LICENSE") for path in shipped)


def test_tests_and_scripts_are_not_shipped(shipped: set[str]) -> None:
    folders = {path.split("/")[0] for path in shipped if "/" in path and not path.startswith("..")}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"flashinfer_cascade"}


def test_console_script_runs(distribution: metadata.Distribution) -> None:
    (entry,) = distribution.entry_points.select(group="console_scripts")
    assert (entry.name, entry.value) == ("flashinfer-cascade", "flashinfer_cascade.cli:main")
    command = Path(sys.executable).with_name(entry.name)
    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "demo" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_every_script_is_known() -> None:
    shell = {f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.suffix != ".py"}
    assert shell | {".ci/run"} == set(SCRIPTS)


def test_readme_names_the_two_commands() -> None:
    lines = {line.split("#")[0].strip() for line in (ROOT / "README.md").read_text().splitlines()}
    assert {"scripts/demo", "scripts/test"} <= lines


def test_ci_runs_what_the_readme_names() -> None:
    assert {"scripts/check", "scripts/demo"} <= commands(".ci/run")
    assert "step tests scripts/test" in commands("scripts/check")
