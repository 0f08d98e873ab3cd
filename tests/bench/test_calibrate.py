"""Calibration finds constants again, leaves some workloads out, and writes what the planner reads."""

import json
import pathlib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flashinfer_cascade import CascadeConfig, CascadePlanner, InvalidBatchError
from flashinfer_cascade.bench.calibrate import CONSTANTS, HELD_OUT, fit, read_samples, report
from flashinfer_cascade.bench.results import read_record
from flashinfer_cascade.cli import app
from flashinfer_cascade.profile import PROFILES, read_profile

RECORD = pathlib.Path(__file__).parents[2] / "docs" / "records" / "h200_executors.json"
BASE = PROFILES["h200"]


@pytest.fixture(scope="module", name="samples")
def samples_fixture():
    return read_samples(read_record(RECORD).rows, BASE)


def test_constants_are_found_again(samples):
    truth = BASE.model_copy(update={"segment_token_ns": (18.0, 13.0), "segment_launch_us": 9.0})
    made = [replace(s, us=s.predict(truth)) for s in samples if s.executor == "segments"]
    fitted = fit(made, BASE, "found")
    assert fitted.name == "found"
    assert fitted.segment_token_ns == pytest.approx(truth.segment_token_ns, rel=0.05)
    assert fitted.segment_launch_us == pytest.approx(9.0, rel=0.15)
    assert fitted.launch_us == BASE.launch_us  # nothing was measured that tells of it


def test_a_fit_predicts_workloads_that_it_did_not_see(samples):
    off = BASE.model_copy(update={"segment_token_ns": (30.0, 5.0), "segment_launch_us": 20.0})
    fitted = fit(samples, off, "fitted")
    unseen = [s for s in samples if s.held_out and s.executor == "segments"]
    assert len(unseen) >= 8
    before, after = (sum(s.error(p) ** 2 for s in unseen) / len(unseen) for p in (off, fitted))
    assert after < before / 4
    assert after**0.5 < 0.12


def test_the_built_in_profile_is_close_to_the_record(samples):
    errors = [abs(s.error(BASE)) for s in samples if s.executor == "segments"]
    assert sum(error < 0.1 for error in errors) >= 0.9 * len(errors)
    assert max(errors) < 0.2


def test_one_workload_in_three_is_held_out(samples):
    of = {s.workload: s.held_out for s in samples}
    assert all(s.held_out == of[s.workload] for s in samples)
    assert sum(of.values()) == len(of) // HELD_OUT


def test_a_record_without_rows(samples):
    with pytest.raises(InvalidBatchError, match="no row to fit to: measure with"):
        read_samples([], BASE)


def test_the_report_has_every_sample(samples):
    every, summary = report(samples, BASE, BASE)
    assert every.row_count == len(samples)
    assert summary.row_count == 6


def test_the_command_writes_a_profile_that_the_planner_takes(tmp_path):
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["calibrate", str(RECORD), "--out", str(out), "--name", "mine"])
    assert result.exit_code == 0, result.output
    assert "held out" in result.output
    assert "warning" not in result.stderr
    profile = read_profile(out)
    assert profile.name == "mine"
    config = CascadeConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    assert CascadePlanner(config, profile=profile).plan([[0]], [3]).parts[0].predicted_us


def test_the_command_warns_of_constants_that_nothing_tells_of(tmp_path):
    record = read_record(RECORD)
    for missing, told, constant in (
        (["segments"], "segments", "segment_"),
        (["flat", "levels"], "flat or levels", "hbm_"),
    ):
        rows = [
            row.model_copy(update={"results": {name: us for name, us in row.results.items() if name not in missing}})
            for row in record.rows[:9]
        ]
        path, out = tmp_path / "record.json", tmp_path / "profile.json"
        path.write_text(record.model_copy(update={"rows": rows}).model_dump_json())
        result = CliRunner().invoke(app, ["calibrate", str(path), "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert f"warning: no time of {told} to fit to, so these stay as in h200: {constant}" in result.stderr
        assert result.stderr.count("warning") == 1
        fitted = read_profile(out)
        untouched = [
            n for executors, names in CONSTANTS.items() if told == executors.replace(", ", " or ") for n in names
        ]
        assert all(getattr(fitted, name) == getattr(BASE, name) for name in untouched)


def test_the_profile_is_of_the_gpu_that_was_measured(tmp_path):
    record, out = tmp_path / "record.json", tmp_path / "profile.json"
    measured = json.loads(RECORD.read_text())
    record.write_text(json.dumps(measured | {"hardware": {"gpu": "some", "num_sms": 58, "capability": "8.9"}}))
    result = CliRunner().invoke(app, ["calibrate", str(record), "--out", str(out)])
    assert result.exit_code == 0, result.output
    profile = read_profile(out)
    assert (profile.num_sms, profile.capability) == (58, (8, 9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--base", "b200"], "--base 'b200' is not built in"), (["nowhere.json"], "nowhere.json")],
)
def test_the_command_refuses_nonsense(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["calibrate", *arguments, "--out", str(tmp_path / "p.json")])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "p.json").exists()


def test_a_file_that_is_no_profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"name": "x", "num_sms": -1}')
    with pytest.raises(InvalidBatchError, match=r"profile\.json is no device profile: .*Calibrate again"):
        read_profile(path)
