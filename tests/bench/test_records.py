"""The committed measurements say what the README and docs claim, and the documents show them."""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench_gpu, bench_graphs = load_script("bench_gpu"), load_script("bench_graphs")
GRAPHS = json.loads(bench_graphs.RECORD.read_text())
RECORD = json.loads(bench_gpu.RECORD.read_text())


def rows(heads=None, counted=False):
    return [
        row
        for row in RECORD["results"]
        if (heads is None or row["heads"] == heads) and (not counted or row["workload"] in bench_gpu.COUNTED)
    ]


def speedup(over, counted):
    return bench_gpu.geomean([row["us"][over][0] / row["us"]["auto"][0] for row in counted])


@pytest.mark.parametrize("script", [bench_gpu, bench_graphs], ids=lambda script: script.__name__)
def test_the_document_shows_the_record(script, monkeypatch):
    monkeypatch.setattr("sys.argv", [script.__name__, "--check"])
    script.main()


def test_the_geometric_means_of_the_readme():
    counted = rows([32, 8], counted=True)
    assert len(counted) == 16
    assert speedup("flat", counted) == pytest.approx(2.3, abs=0.05)
    assert speedup("stock_fa2", counted) == pytest.approx(2.1, abs=0.05)
    assert all(row["us"]["stock_fa2"][0] < row["us"]["stock_default"][0] for row in counted)


def test_the_choice_never_loses_more_than_three_percent_to_flat():
    assert len(rows()) > 90
    assert not list(bench_gpu.losses(RECORD, 1.03))


def test_levels_are_never_slower_than_the_stock_wrapper():
    for row in rows():
        assert row["us"]["levels"][0] <= row["us"]["stock_fa2"][0], (row["workload"], row["heads"])


def test_every_result_is_within_its_error_budget():
    for row in rows():
        for name in ("auto", "flat", "levels"):
            assert row["max_error"][name] <= row["error_budget"], (row["workload"], row["heads"], name)


def test_predictions_of_whole_plans_are_close():
    for name in ("flat", "levels"):
        ratios = [row["predicted_us"][name] / row["us"][name][0] for row in rows() if name in row["predicted_us"]]
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


def test_a_whole_model_gains_where_there_is_sharing_and_loses_nothing_elsewhere():
    gain = {
        row["workload"]: row["cascade"]["tokens_per_s"] / row["flat"]["tokens_per_s"] for row in GRAPHS["model"]["rows"]
    }
    assert gain["S1"] == pytest.approx(1.6, abs=0.05)
    assert gain["P10"] > 1.5
    assert min(gain.values()) > 0.98
