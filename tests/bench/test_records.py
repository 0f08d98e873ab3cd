"""The committed measurements say what the README and docs claim, and the documents show them."""

import importlib.util
import json
import pathlib
import shutil

import pytest

from flashinfer_cascade import CascadePlanner
from flashinfer_cascade.bench import records
from flashinfer_cascade.bench.cases import COUNTED
from flashinfer_cascade.bench.results import OURS, geomean, read_record
from flashinfer_cascade.bench.roof import roof

ROOT = pathlib.Path(__file__).parents[2]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench_docs, bench_graphs, serve = (load_script(name) for name in ("bench_docs", "bench_graphs", "serve"))
GRAPHS = json.loads(bench_graphs.RECORD.read_text())
ROWS = [row for path in bench_docs.RECORDS for row in read_record(path).rows]
TREE_ROWS = [row for row in ROWS if row.suite in ("decode", "heads") and row.page_size == 16]
COUNTED_ROWS = [row for row in ROWS if row.group == ("decode", 32, 8, 16, "bfloat16") and row.workload in COUNTED]


@pytest.mark.parametrize("script", [bench_docs, bench_graphs, serve], ids=lambda script: script.__name__)
def test_the_document_shows_the_record(script, monkeypatch):
    monkeypatch.setattr("sys.argv", [script.__name__, "--check"])
    script.main()


@pytest.mark.parametrize("change", ["table", "image", "no image", "an image too many"])
def test_a_document_that_shows_anything_else_is_noticed(change, monkeypatch, tmp_path):
    shutil.copytree(bench_docs.IMAGES, tmp_path / "images")
    shutil.copy(bench_docs.DOCUMENT, tmp_path)
    monkeypatch.setattr(bench_docs, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(bench_docs, "DOCUMENT", tmp_path / "benchmarks.md")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench_docs", "--check"])
    bench_docs.main()
    first = min((tmp_path / "images").iterdir())
    if change == "table":
        document = bench_docs.DOCUMENT.read_text()
        bench_docs.DOCUMENT.write_text(document.replace("| P10 | 20.6 |", "| P10 | 20.7 |", 1))
    elif change == "image":
        first.write_text(first.read_text().replace("A1", "A2", 1))
    elif change == "no image":
        first.unlink()
    else:
        (tmp_path / "images" / "bench-old.svg").write_text("<svg/>")
    with pytest.raises(SystemExit, match=r"is stale: run python scripts/bench_docs\.py --write"):
        bench_docs.main()
    monkeypatch.setattr("sys.argv", ["bench_docs", "--write"])
    bench_docs.main()
    monkeypatch.setattr("sys.argv", ["bench_docs", "--check"])
    bench_docs.main()


def speedup(over):
    return geomean(row.results[over].us / row.results["auto"].us for row in COUNTED_ROWS)


def test_the_geometric_means_of_the_readme():
    assert [row.workload for row in COUNTED_ROWS] == list(COUNTED)
    assert speedup("flat") == pytest.approx(3.5, abs=0.05)
    assert speedup("stock_fa2") == pytest.approx(3.2, abs=0.05)
    assert all(row.results["stock_fa2"].us < row.results["stock_default"].us for row in COUNTED_ROWS)


def test_todays_choice_is_the_fastest_executor_of_the_record():
    """And it loses to none of FlashInfer's own ways, in any suite."""
    assert len(ROWS) == 77
    for row in ROWS:
        work, config = row.case.build()
        (part,) = CascadePlanner(config).plan(work.block_tables, work.seq_lens, work.qo_lens).parts
        us = {name: result.us for name, result in row.results.items() if name != "auto"}
        assert us[part.executor] <= 1.02 * min(us[name] for name in OURS if name in us), row.case
        assert us[part.executor] <= min(us.values()) / 0.98, row.case


def test_the_choice_never_loses_more_than_three_percent_to_flat():
    assert len(TREE_ROWS) == 50
    for row in TREE_ROWS:
        auto, flat = row.results["auto"], row.results["flat"]
        assert auto.us <= 1.03 * flat.us or auto.low_us <= flat.high_us, row.case


def test_levels_are_never_slower_than_the_stock_wrapper():
    for row in TREE_ROWS:
        assert row.results["levels"].us <= row.results["stock_fa2"].us, row.case


def test_every_result_is_within_its_error_budget():
    for row in ROWS:
        assert not set(row.wrong()) & set(OURS), row.case


def test_rows_and_roofs_are_those_of_the_grid():
    for row in ROWS:
        work, config = row.case.build()
        assert row.roof_us == pytest.approx(roof(config, work).us, abs=0.006), row.case
        assert (row.num_requests, row.description) == (work.num_requests, work.description)


def test_predictions_of_whole_plans_are_close():
    for name in ("flat", "levels"):
        choices = [(row.choices["levels"].predicted_us, row.results[name].us) for row in TREE_ROWS]
        ratios = [predicted[name] / us for predicted, us in choices if name in predicted]
        assert sum(1 / 1.15 <= ratio <= 1.15 for ratio in ratios) >= 0.8 * len(ratios)
        assert all(1 / 1.4 <= ratio <= 1.4 for ratio in ratios)


def test_graphs_are_close_to_eager_plans_and_ahead_of_the_stock_wrapper_s():
    assert len(GRAPHS["attention"]) == len(bench_graphs.ATTENTION)
    for row in GRAPHS["attention"]:
        us = {name: value[0] for name, value in row["us"].items()}
        assert us["pool"] < us["stock"], row["workload"]
        assert us["pool"] < 1.35 * us["own"], row["workload"]
        assert row["load_us"]["pool"] < row["load_us"]["stock"] / 2, row["workload"]
        for name in ("own", "pool", "one_for_all"):
            assert row["max_error"][name] <= row["error_budget"], (row["workload"], name)


def test_serving_gains_where_there_is_sharing():
    cases = {case["name"]: case for case in json.loads(serve.RECORD.read_text())["cases"]}
    gain = {name: case["gain"]["decode_tokens_per_s"] for name, case in cases.items()}
    assert gain["tools"] == pytest.approx(1.4, abs=0.05)
    assert gain["samples"] == pytest.approx(1.1, abs=0.05)
    assert gain["conversation"] > 0.98
    assert all(case["agreement"]["ok"] for case in cases.values())


def test_a_whole_model_gains_where_there_is_sharing_and_loses_nothing_elsewhere():
    gain = {
        row["workload"]: row["cascade"]["tokens_per_s"] / row["flat"]["tokens_per_s"] for row in GRAPHS["model"]["rows"]
    }
    assert gain["S1"] == pytest.approx(1.6, abs=0.05)
    assert gain["P10"] > 1.5
    assert min(gain.values()) > 0.98
