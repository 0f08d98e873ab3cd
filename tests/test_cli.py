"""The command line, as its users see it: output, exit status, and one line for whatever they got wrong."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from typer.testing import CliRunner

from flashinfer_cascade import DeviceProfile, __version__
from flashinfer_cascade.bench.traces import CONVERSATION
from flashinfer_cascade.cli import app
from flashinfer_cascade.profile import PROFILES

BATCH = {"block_tables": [[0, 1, 2], [0, 1, 3], [4]], "seq_lens": [40, 48, 5]}
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="executes with torch")


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, list(map(str, arguments)), input=stdin)


def answer(*arguments, stdin=None):
    """The JSON that a successful call prints."""
    result = invoke(*arguments, "--json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def complaint(*arguments, stdin=None):
    """The one line that a refused call prints."""
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_version_and_help():
    assert invoke("--version").stdout == f"flashinfer-cascade {__version__}\n"
    listed = invoke("--help").stdout
    assert all(command in listed for command in ("plan", "demo", "doctor"))


def test_plan_of_a_file_and_of_stdin_agree(tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(BATCH))
    of_file, of_stdin = answer("plan", path), answer("plan", "-", stdin=json.dumps(BATCH))
    assert (of_file.pop("batch"), of_stdin.pop("batch")) == ("batch.json", "stdin")
    assert of_file == of_stdin
    assert of_file["profile"] == "h200"
    assert (of_file["num_requests"], of_file["num_rows"], of_file["nodes_found"]) == (3, 3, 1)


def test_plan_obeys_its_options():
    forced = answer("plan", "-", "--executor", "levels", stdin=json.dumps(BATCH))
    assert (forced["parts"][0]["executor"], forced["num_levels"]) == ("levels", 2)
    flat = answer("plan", "--workload", "P10", "--executor", "flat")
    assert flat["kv_read_bytes"] == flat["kv_flat_bytes"]
    half = answer("plan", "--workload", "P10", "--executor", "flat", "--num-kv-heads", 4, "--dtype", "float16")
    assert 2 * half["kv_flat_bytes"] == flat["kv_flat_bytes"]
    assert answer("plan", "--workload", "P14", "--executor", "levels", "--max-levels", 2)["num_levels"] == 2
    assert answer("plan", "--workload", "beam", "--page-size", 64)["page_size"] == 64


def test_plan_takes_query_lengths():
    appended = answer("plan", "-", stdin=json.dumps(BATCH | {"qo_lens": [4, 20, 1]}))
    assert [part["name"] for part in appended["parts"]] == ["decode", "append"]
    assert appended["num_rows"] == 25


def test_plan_of_a_trace():
    first = answer("plan", CONVERSATION, "--batch", 8, "--samples", 4)
    second = answer("plan", CONVERSATION, "--batch", 8, "--samples", 4, "--skip", 1)
    assert first["num_requests"] == second["num_requests"] == 32
    assert first["batch"] != second["batch"]
    assert first["parts"][0]["executor"] == "segments"


def test_plan_explains_in_words():
    result = invoke("plan", "--workload", "S1")
    assert result.exit_code == 0
    assert "S1, on the h200 profile" in result.stdout
    assert "predicted" in result.stdout
    assert "\x1b" not in result.stdout


def test_plan_draws_a_picture(tmp_path):
    assert invoke("plan", "--workload", "P9", "--picture", tmp_path / "p9.svg").exit_code == 0
    assert xml.etree.ElementTree.parse(tmp_path / "p9.svg").getroot().tag.endswith("svg")
    assert "does not end in .svg" in complaint("plan", "--workload", "P9", "--picture", tmp_path / "p9.png")
    assert "No such file" in complaint("plan", "--workload", "P9", "--picture", tmp_path / "none" / "p9.svg")


def test_plan_takes_a_profile_from_a_file(tmp_path):
    profile = DeviceProfile.model_validate(PROFILES["a100"].model_dump() | {"name": "mine"})
    path = tmp_path / "mine.json"
    path.write_text(profile.model_dump_json())
    mine, built_in = (answer("plan", "--workload", "P3", "--profile", p) for p in (path, "a100"))
    assert (mine["profile"], built_in["profile"]) == ("mine", "a100")
    assert mine["parts"] == built_in["parts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a file or --workload"),
        (["-", "--workload", "P1"], "give either a file or --workload"),
        (["--workload", "P21"], "no workload 'P21': choose from P1"),
        (["nowhere.json"], "nowhere.json: No such file or directory"),
        (["nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        ([CONVERSATION, "--skip", 99], "no batch of 64 prompts is left"),
        ([CONVERSATION, "--batch", 0], "batch=0 must be at least 1"),
        ([CONVERSATION, "--samples", 0], "samples=0 must be at least 1"),
        (["--workload", "P1", "--page-size", 0], "page_size=0 must be at least 1"),
        (["--workload", "P1", "--num-kv-heads", 5], "not a multiple of num_kv_heads=5"),
        (["--workload", "P1", "--head-dim", 96], "head_dim=96"),
        (["--workload", "P1", "--dtype", "int8"], "dtype='int8' must be one of"),
        (["--workload", "P1", "--executor", "fast"], "executor: Input should be 'auto', 'flat'"),
        (["--workload", "P1", "--max-levels", 1], "max_levels: Input should be greater than or equal to 2"),
        (["--workload", "P1", "--profile", "b100"], "--profile b100: choose from h200"),
        (["--workload", "P1", "--profile", "nowhere.json"], "nowhere.json: No such file or directory"),
    ],
)
def test_plan_refuses_wrong_arguments_in_one_line(arguments, message):
    assert message in complaint("plan", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "stdin: not JSON"),
        ("{", "stdin: not JSON"),
        ("[" * 100_000, "stdin: not JSON"),
        ("[1, 2]", "stdin: give an object with block_tables, seq_lens and maybe qo_lens, not a list"),
        ('{"seq_lens": [1]}', "stdin: give an object with block_tables, seq_lens"),
        ('{"block_tables": [[0]], "seq_lens": [1], "page": 16}', "not block_tables, page, seq_lens"),
        ('{"block_tables": [], "seq_lens": []}', "the batch is empty"),
        ('{"block_tables": [[0]], "seq_lens": [17]}', "request 0: its table has 1 pages"),
        ('{"block_tables": [[-1]], "seq_lens": [1]}', "request 0: page id -1"),
        ('{"block_tables": [["a"]], "seq_lens": [1]}', "request 0: page id 'a'"),
        ('{"block_tables": [[0.5]], "seq_lens": [1]}', "request 0: page id 0.5"),
        ('{"block_tables": 7, "seq_lens": [1]}', "block_tables is 7: give a list of tables"),
        ('{"block_tables": [[0]], "seq_lens": [NaN]}', "seq_lens holds float64 values"),
        ('{"block_tables": [[0]], "seq_lens": [1e99]}', "seq_lens holds float64 values"),
        ('{"block_tables": [[0]], "seq_lens": null}', "seq_lens"),
        ('{"block_tables": [[0]], "seq_lens": [1], "qo_lens": [2]}', "qo_lens[0] = 2 exceeds seq_lens[0] = 1"),
    ],
)
def test_plan_refuses_wrong_batches_in_one_line(text, message):
    assert message in complaint("plan", "-", stdin=text)


@pytest.mark.parametrize("text", ["{", '{"name": "x"}', '{"name": "x", "speed": 3}'])
def test_a_wrong_profile_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    complaint("plan", "--workload", "P1", "--profile", path)


def test_a_wrong_trace_is_refused_with_its_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 5, "hash_ids": [0]}\n{"input_length": 5}\n')
    assert f"{path}:2: no hash_ids" in complaint("plan", path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x1f\x8b binary"])
def test_files_that_are_no_text_are_refused_in_one_line(tmp_path, content):
    for name in ("batch.json", "trace.jsonl"):
        (tmp_path / name).write_bytes(content)
        complaint("plan", tmp_path / name)


def test_planning_from_the_command_line_imports_no_torch():
    code = (
        "import sys; from flashinfer_cascade.cli import app; "
        "app(['plan', '--workload', 'P3', '--json'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@needs_torch
def test_demo_executes_and_agrees_with_the_oracle(tmp_path):
    results = answer("demo", "--only", "P4", "--only", "tree-search", "--picture-dir", tmp_path / "pictures")
    assert [(r["workload"], r["policy"]) for r in results] == [
        ("P4", "auto"),
        ("P4", "forced"),
        ("tree-search", "auto"),
        ("tree-search", "forced"),
    ]
    for result in results:
        assert result["ok"]
        assert 0 < result["max_error"] <= result["budget"]
        if result["policy"] == "forced":
            assert result["executor"] == "levels"
            assert result["num_levels"] > 2
            assert result["kv_saving"] > 5
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {f"{r['workload']}-{r['policy']}.svg" for r in results}


@needs_torch
def test_demo_fails_when_a_result_is_wrong(monkeypatch):
    from flashinfer_cascade.bench import demo

    real = demo.execute

    def spoiled(name):
        for result, plan in real(name):
            yield dataclasses.replace(result, max_error=2 * result.budget), plan

    monkeypatch.setattr(demo, "execute", spoiled)
    result = invoke("demo", "--only", "P4")
    assert result.exit_code == 1
    assert result.stdout.count("FAILED") == 2
    assert "0 of 2 executed plans agree" in result.stdout


@needs_torch
def test_demo_notices_a_wrong_plan(monkeypatch):
    from flashinfer_cascade.bench import demo

    real = demo.CascadeRuntime.run
    monkeypatch.setattr(demo.CascadeRuntime, "run", lambda self, q, kv: real(self, q, kv.roll(1, 0)))
    assert all(not result.ok for result, _ in demo.execute("P4"))


@needs_torch
def test_demo_table_fits_a_narrow_terminal():
    result = invoke("demo", "--only", "sampling")
    assert result.exit_code == 0
    assert "2 of 2 executed plans agree" in result.stdout
    assert "…" not in result.stdout


@needs_torch
def test_demo_refuses_unknown_workloads():
    assert "the demo has no workload 'P99': choose from conversation" in complaint("demo", "--only", "P99")


@needs_torch
def test_demo_serves(monkeypatch):
    record = answer("demo", "--serve", "--only", "samples")
    (case,) = record["cases"]
    assert case["agreement"]["ok"]
    assert case["cascade"][0]["kv_read_bytes"] < 0.4 * case["flat"][0]["kv_read_bytes"]
    from flashinfer_cascade.engine import serve

    monkeypatch.setattr(serve, "agrees", lambda record: False)
    result = invoke("demo", "--serve", "--only", "samples")
    assert result.exit_code == 1
    assert "cascade against flat" in result.stdout


@needs_torch
def test_demo_refuses_to_serve_what_it_does_not_know():
    assert "the demo serves no 'P4': choose from samples, tools" in complaint("demo", "--serve", "--only", "P4")
    assert "--picture-dir draws the plans" in complaint("demo", "--serve", "--picture-dir", "x")


def test_doctor_reports_this_machine():
    found = answer("doctor")
    assert found["versions"]["flashinfer-cascade"] == __version__
    assert set(found["executors"]) == {"reference", "flat", "levels", "segments", "stock"}
    assert set(found["libraries"]) == {"torch", "flashinfer", "triton"}
    if found["libraries"]["torch"]["error"] is None:
        assert found["executors"]["reference"] is None
    if not found["gpus"]:
        assert found["executors"]["levels"]
