"""What the doctor concludes from what it finds, on machines that are not this one."""

import copy
import subprocess

import pytest
from typer.testing import CliRunner

from flashinfer_cascade import doctor
from flashinfer_cascade.cli import app

FINE = {"version": "1.0", "error": None}
GPU = {"name": "NVIDIA H200", "memory_gb": 150.1, "capability": "9.0", "profile": "h200"}
HEALTHY = {
    "libraries": {"torch": FINE, "flashinfer": FINE, "triton": FINE},
    "cuda": "13.0",
    "gpus": [GPU],
    "nvrtc": True,
}


def examined(monkeypatch, **changes):
    probed = copy.deepcopy(HEALTHY)
    for key, value in changes.items():
        if key in probed["libraries"]:
            probed["libraries"][key] = {"version": None, "error": value}
        else:
            probed[key] = value
    monkeypatch.setattr(doctor, "_probe_apart", lambda: probed)
    return doctor.examine()


def test_a_healthy_machine_runs_everything(monkeypatch):
    found = examined(monkeypatch)
    assert found["executors"] == dict.fromkeys(("reference", "flat", "levels", "segments", "stock"))
    lines = {finding.name: finding for finding in doctor.findings(found)}
    assert lines["GPU"].found == "NVIDIA H200, 150 GB, capability 9.0, profile h200"
    assert lines["GPU"].ok


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_native_core_is_a_finding(monkeypatch, there):
    monkeypatch.setattr(doctor, "load_core", lambda: object() if there else None)
    lines = {finding.name: finding for finding in doctor.findings(examined(monkeypatch))}
    assert lines["native core of the planner"].ok == there


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"torch": "torch is not installed"}, "torch: torch is not installed"),
        ({"cuda": None, "gpus": []}, "torch is built without CUDA"),
        ({"gpus": []}, "torch finds no CUDA GPU"),
        ({"gpus": [GPU | {"capability": "7.5"}]}, "no GPU has capability 8.0 or newer"),
        ({"flashinfer": "import fails: no libcudart"}, "flashinfer: import fails: no libcudart"),
        ({"triton": "triton is not installed"}, "triton: triton is not installed"),
    ],
)
def test_the_first_obstacle_is_named(monkeypatch, changes, reason):
    found = examined(monkeypatch, **changes)
    assert {found["executors"][name] for name in ("flat", "levels", "segments", "stock")} == {reason}
    assert (found["executors"]["reference"] is None) == ("torch" not in changes)


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_nvrtc_is_a_finding(monkeypatch, there):
    found = examined(monkeypatch, nvrtc=there)
    lines = {finding.name: finding for finding in doctor.findings(found)}
    assert lines["NVRTC"].ok == there
    assert found["executors"]["segments"] is None
    without_gpu = examined(monkeypatch, nvrtc=there, gpus=[])
    assert "NVRTC" not in {finding.name for finding in doctor.findings(without_gpu)}


def test_the_table_shows_reasons(monkeypatch):
    monkeypatch.setattr(doctor, "_probe_apart", lambda: HEALTHY | {"gpus": []})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "not here: torch finds no CUDA GPU" in result.stdout
    assert "none that torch can use" in result.stdout


@pytest.mark.parametrize("command", [["false"], ["true"], ["sh", "-c", "echo Segmentation fault >&2; exit 139"]])
def test_a_library_that_crashes_is_a_finding(monkeypatch, command):
    real = subprocess.run
    monkeypatch.setattr(doctor.subprocess, "run", lambda _, **options: real(command, **options))
    found = doctor.examine()
    assert found["libraries"]["torch"]["error"].startswith("looking at it failed: ")
    assert found["executors"]["reference"]


def test_a_broken_import_is_a_finding(monkeypatch):
    def broken(name):
        raise OSError("libcuda.so.1: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "version", lambda package: "9.9")
    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    probed = doctor.probe()
    error = "import fails: libcuda.so.1: cannot open shared object file"
    assert probed["libraries"]["flashinfer"] == {"version": "9.9", "error": error}
    assert probed["gpus"] == []
