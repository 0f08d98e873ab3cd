"""Serving from end to end: cases, sizes, the record and what is printed of it."""

import copy
import importlib.util
import io
import json
import pathlib

import pytest
import torch
from rich.console import Console

from flashinfer_cascade import InvalidBatchError
from flashinfer_cascade.engine import serve as serve_module
from flashinfer_cascade.engine.cases import SMALL, SMALL_OPTIONS, SUITE, ServeOptions, make_cases
from flashinfer_cascade.engine.serve import agrees, serve
from flashinfer_cascade.engine.show import markdown

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "serve.py"


def served(changes=None, width=80, **options):
    printed = io.StringIO()
    record = serve(ServeOptions(device="cpu", **options), changes or {}, Console(file=printed, width=width), "abc")
    return json.loads(json.dumps(record)), printed.getvalue()


@pytest.fixture(scope="module", name="small")
def small_fixture():
    printed = io.StringIO()
    record = serve(ServeOptions(**SMALL_OPTIONS), SMALL, Console(file=printed, width=80), "abc")
    return json.loads(json.dumps(record)), printed.getvalue()


def test_the_demo_serves_all_three_and_they_agree(small):
    record, printed = small
    assert [case["name"] for case in record["cases"]] == ["samples", "tools", "conversation"]
    assert agrees(record)
    for case in record["cases"]:
        flat, cascade = case["flat"][0], case["cascade"][0]
        assert flat["kv_read_bytes"] == flat["kv_flat_bytes"] == cascade["kv_flat_bytes"]
        assert flat["new_tokens"] == cascade["new_tokens"] == 16 * case["sequences"]
        assert flat["preemptions"] == 0
        assert {name.split(": ")[1] for name in flat["executors"]} == {"flat"}
        assert "decode: levels" in cascade["executors"]
        assert case["gain"]["tokens_per_s"] > 0
    samples, tools, conversation = (
        case["cascade"][0]["kv_read_bytes"] / case["cascade"][0]["kv_flat_bytes"] for case in record["cases"]
    )
    assert max(samples, tools) < 0.4
    assert 0.8 < conversation < 1
    assert record["cases"][0]["cascade"][0]["copied_pages"] == 4 * 3
    assert printed.count(" ok; from dense float32") == 3
    assert "cascade against flat" in printed


def test_the_record_says_what_it_is_of(small):
    record, _ = small
    assert {"hardware", "versions", "commit", "date", "model", "engine", "policy", "captured"} < record.keys()
    assert record["commit"] == "abc"
    assert record["versions"]["torch"] == torch.__version__
    assert record["model"]["num_layers"] == 2
    assert record["captured"]["graphs"] == 5


def test_a_row_of_wrong_logits_fails_the_record(small):
    record = copy.deepcopy(small[0])
    record["cases"][1]["agreement"]["ok"] = False
    assert not agrees(record)


def test_tables_fit_a_terminal(small):
    assert "…" not in small[1]
    assert max(map(len, small[1].splitlines())) <= 80


def test_without_compare_one_policy_runs():
    record, printed = served(samples="2x2", prompt=20, output=3, policy="levels", repeats=2, batch=4, budget=32)
    (case,) = record["cases"]
    assert [run["new_tokens"] for run in case["runs"]] == [12, 12]
    assert "agreement" not in case
    assert "2 prompts of 20 tokens, 2 samples each" in printed
    assert agrees(record)


def test_few_pages_preempt():
    record, printed = served(
        samples="3x2", prompt=21, output=24, pages=20, page_size=4, batch=6, budget=32, compare=True, repeats=1
    )
    assert record["cases"][0]["cascade"][0]["preemptions"] > 0
    assert record["engine"]["num_pages"] == 20
    assert agrees(record)
    assert "0 preemptions" not in printed


def test_pages_are_enough_for_the_largest_batch():
    record, _ = served(
        {"one": {"samples": "5x1", "prompt": 30}, "two": {"samples": "1x1", "prompt": 60}}, output=4, batch=3, repeats=1
    )
    # Three sequences of 34 tokens have 3 pages each, one of 64 has 4.
    assert (record["engine"]["num_pages"], record["engine"]["max_seq_len"]) == (9, 64)


def test_nothing_to_serve_is_refused():
    with pytest.raises(InvalidBatchError, match="nothing to serve: give samples, tools or a trace"):
        served()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": "8"}, "samples\n  String should match pattern"),
        ({"samples": "0x8"}, "samples\n  String should match pattern"),
        ({"policy": "fast"}, "policy\n  Input should be 'auto', 'levels' or 'flat'"),
        ({"shrink": 100}, "shrink\n  Input should be less than or equal to 64"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ServeOptions(**options)


def test_the_suite_is_what_the_documents_say():
    cases = [make_cases(ServeOptions(**change), 32000)[0] for change in SUITE.values()]
    assert [case.num_sequences for case in cases] == [64, 64, 64]
    assert {len(request.prompt) for request in cases[0].requests} == {4096}
    assert max(len(request.prompt) for request in cases[2].requests) == 4096


def test_progress_is_drawn_on_a_terminal(monkeypatch):
    monkeypatch.setattr("flashinfer_cascade.engine.show.REFRESH_SECONDS", 0.0)
    printed = io.StringIO()
    console = Console(file=printed, width=120, force_terminal=True)
    serve(ServeOptions(samples="2x2", prompt=20, output=3, repeats=1, batch=4, device="cpu"), {}, console, "abc")
    assert "4 running, 0 waiting" in printed.getvalue()


def test_a_record_becomes_a_table(small):
    record = copy.deepcopy(small[0])
    record["hardware"]["gpu"], record["versions"]["flashinfer"] = "H200", "0.7"
    text = markdown(record)
    assert text.startswith("H200, FlashInfer 0.7, torch ")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert len({row.count("|") for row in rows}) == 1
    assert f"| {small[0]['cases'][0]['agreement']['max_error']:.4f} |" in rows[2]


def load_script():
    spec = importlib.util.spec_from_file_location("serve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_a_record_and_fails_when_logits_differ(monkeypatch, tmp_path, capsys):
    script, path = load_script(), tmp_path / "record.json"
    arguments = ["--samples", "2x2", "--prompt", "20", "--output", "3", "--compare", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["serve.py", *arguments, "--json", str(path), "--commit", "abc"])
    with pytest.raises(SystemExit, match=r"^False$"):
        script.main()
    record = json.loads(path.read_text())
    assert (record["commit"], record["cases"][0]["requests"], len(record["cases"][0]["flat"])) == ("abc", 2, 3)
    real = serve_module.compare

    def spoiled(*given, **options):
        comparison = real(*given, **options)
        object.__setattr__(comparison.agreement, "max_error", 1.0)
        return comparison

    monkeypatch.setattr(serve_module, "compare", spoiled)
    with pytest.raises(SystemExit, match=r"^True$"):
        script.main()
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to serve"),
        (["--suite"], "--suite needs a GPU: flashinfer-cascade demo --serve is the same in small"),
        (["--samples", "2x9", "--batch", "8"], "request 0 can never run: max_batch_size 9 > 8"),
        (["--trace", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
    ],
)
def test_the_script_refuses_wrong_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["serve.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        load_script().main()
    assert message in capsys.readouterr().err
