"""Records: round trips, stale ones, files that are written whole; and what a row says of its candidates."""

import json
import os

import pydantic
import pytest

from flashinfer_cascade import InvalidBatchError
from flashinfer_cascade.bench.results import SCHEMA, Ceilings, Measured, geomean, read_record, write_record


def test_a_record_survives_its_file(tmp_path, make_row, make_record):
    ceilings = Ceilings(read_tb_per_s=4.4, copy_tb_per_s=3.9, matmul_tflops=700)
    record = make_record(
        make_row(flat=30.0, auto=20.0), make_row("P2", flat=1.0), ceilings=ceilings, left_out={"P3": "too large"}
    )
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_writing_that_fails_leaves_the_old_record(tmp_path, monkeypatch, make_row, make_record):
    path = tmp_path / "record.json"
    before = make_record(make_row(flat=30.0))
    write_record(before, path)

    def full(fd):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_record(make_record(make_row("P2", flat=1.0)), path)
    assert read_record(path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": SCHEMA + 1}, f"schema_version={SCHEMA + 1} must be {SCHEMA}: measure again"),
        ({"schema_version": None}, f"schema_version=None must be {SCHEMA}"),
        ({"results": []}, "results: Extra inputs are not permitted"),
        ({"rows": [{"workload": "P1"}]}, r"rows\.0\.suite: Field required"),
        ({"rows": 3}, "rows: Input should be a valid array"),
    ],
)
def test_stale_records_are_refused_by_name(tmp_path, make_row, make_record, change, message):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(make_record(make_row(flat=30.0)).model_dump() | change))
    with pytest.raises(InvalidBatchError, match=rf"old\.json is no record of this version: {message}"):
        read_record(path)


def test_the_record_of_before_this_format_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"what": "us a layer", "results": []}')
    with pytest.raises(InvalidBatchError, match="schema_version=None must be"):
        read_record(path)
    path.write_text("{")
    with pytest.raises(InvalidBatchError, match=r"old\.json is no record of this version: Invalid JSON"):
        read_record(path)


def test_a_time_lies_in_its_spread():
    with pytest.raises(pydantic.ValidationError, match=r"us=5\.0 lies outside its spread, 6\.0 to 7\.0"):
        Measured(us=5, low_us=6, high_us=7, max_error=0)


@pytest.mark.parametrize(
    ("auto", "flat", "lost"),
    [
        ((103.0, 102.5, 104.0), (100.0, 99.0, 101.0), True),
        ((101.9, 101.8, 102.0), (100.0, 99.0, 101.0), False),  # within 2%
        ((103.0, 101.0, 104.0), (100.0, 99.0, 101.0), False),  # within the spread
        ((90.0, 89.0, 91.0), (100.0, 99.0, 101.0), False),
    ],
)
def test_a_row_is_lost_beyond_two_percent_and_the_spread(make_row, auto, flat, lost):
    # The slow stock wrapper is no excuse: the fastest baseline counts.
    row = make_row(flat=flat, stock_fa2=500.0, auto=auto)
    assert row.lost() is lost
    assert row.best_baseline() == "flat"


def test_gains_are_over_the_best_of_flashinfer_and_flat(make_row):
    row = make_row(roof_us=8.0, flat=40.0, decode=38.0, stock_fa2=30.0, levels=12.0, segments=10.0, auto=15.0)
    assert row.best_baseline() == "stock_fa2"
    assert (row.speedup(), row.speedup("segments"), row.ratio("auto")) == (2.0, 3.0, 15 / 8)
    assert row.speedup("nothing") is row.ratio("prefill_fa3") is None
    alone = make_row(levels=12.0, auto=12.0)
    assert alone.best_baseline() is alone.speedup() is None
    assert not alone.lost()


def test_results_beyond_the_budget_are_wrong(make_row):
    row = make_row(flat=40.0, auto=20.0, levels=20.0)
    assert row.wrong() == []
    spoiled = row.results | {
        "auto": row.results["auto"].model_copy(update={"max_error": None}),
        "levels": row.results["levels"].model_copy(update={"max_error": 0.0061}),
    }
    assert row.model_copy(update={"results": spoiled}).wrong() == ["auto", "levels"]


def test_rows_of_one_table_share_suite_heads_pages_and_dtype(make_row, make_record):
    rows = [
        make_row("P1", flat=1.0),
        make_row("P1", flat=1.0, suite="heads", heads=(16, 1)),
        make_row("P2", flat=1.0),
        make_row("beam", flat=1.0, suite="irregular", heads=(16, 8)),
        make_row("chat", flat=1.0, suite="irregular"),
        make_row("chat", flat=1.0, suite="irregular", page_size=1),
    ]
    labels = [[row.label for row in group] for group in make_record(*rows).groups()]
    assert labels == [["P1", "P2"], ["P1"], ["beam (16/8)", "chat"], ["chat"]]


def test_geomean():
    assert geomean([1.0, 4.0]) == pytest.approx(2)
    assert geomean(x for x in (2.0, 4.0, 8.0)) == pytest.approx(4)
