"""Tables say what the rows say, and what is missing."""

import pytest
from rich.console import Console

from flashinfer_cascade.bench import tables
from flashinfer_cascade.bench.cases import COUNTED
from flashinfer_cascade.bench.results import Ceilings


def text(rows):
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables.terminal(rows))
    return console.export_text()


@pytest.fixture
def rows(make_row):
    fine = make_row("P1", roof_us=10.0, flat=40.0, stock_fa2=30.0, levels=25.0, auto=15.0)
    lost = make_row("P2", roof_us=10.0, flat=40.0, stock_fa2=30.0, auto=35.0)
    lost.refused["levels"] = "UnsupportedError: not here"
    return [fine, lost]


def test_markdown_has_a_dash_for_what_was_refused_and_says_why(rows):
    lines = tables.section(rows)
    assert lines[0] == "| workload | roof | stock fa2 | flat | levels | auto | auto is | x roof | vs best stock |"
    assert lines[2] == "| P1 | 10.0 | 30.0 | 40.0 | 25.0 | 15.0 | levels | 1.5 | 2.00x |"
    assert lines[3] == "| P2 | 10.0 | 30.0 | 40.0 | - | 35.0 | levels | 3.5 | **0.86x, lost** |"
    assert all(line.count("|") == lines[0].count("|") for line in lines[:4])
    assert "- Lost by more than 2% and the spread: P2." in lines
    assert "- levels refused 1 of 2: UnsupportedError: not here" in lines


def test_means_are_over_the_counted_trees_alone(make_row):
    rows = [make_row(name, roof_us=10.0, flat=40.0, auto=20.0) for name in COUNTED]
    rows.append(make_row("S1", roof_us=10.0, flat=40.0, auto=4000.0))
    first, second = tables.means(rows)
    assert first.startswith("Geometric means over 16 trees")
    assert "auto 2.00x as fast as the best stock way, 2.00x roof" in first
    assert second == "By these means auto is 2.00x as fast as flat."
    assert tables.means(rows[-1:]) == []


def test_wrong_results_and_unchecked_rows_are_told_of(rows):
    rows[0].results["auto"] = rows[0].results["auto"].model_copy(update={"max_error": None})
    rows[1] = rows[1].model_copy(update={"checked_rows": 2})
    notes = tables.remarks(rows)
    assert "Beyond the error budget: P1 auto (None, allowed 0.006)." in notes
    assert any(note.endswith("1 of 2 workloads.") for note in notes)
    assert "WRONG: auto" in tables.in_one_line(rows[0])
    assert "WRONG" in text(rows).splitlines()[-2]


def test_terminal_shows_times_over_the_roof(rows):
    lines = [line.split() for line in text(rows).splitlines()]
    assert lines[-2] == ["P1", "10.0", "3.0", "4.0", "2.5", "1.5", "2.00x"]
    assert lines[-1] == ["P2", "10.0", "3.0", "4.0", "-", "3.5", "0.86x", "lost"]


def test_a_row_in_one_line(rows):
    assert tables.in_one_line(rows[1]) == (
        "P2, 32/8 heads, page 16, bfloat16: roof 10.0 stock_fa2 30.0 flat 40.0 auto 35.0 -> levels, 0.86x the best "
        "stock way LOST"
    )


def test_titles_tell_groups_apart(make_row, make_record):
    rows = [
        make_row(auto=1.0),
        make_row(auto=1.0, page_size=1),
        make_row(auto=1.0, suite="heads", heads=(64, 8)),
        make_row(auto=1.0, suite="fp8", kv_dtype="float8_e4m3fn"),
        make_row("A1", auto=1.0, suite="append"),
        make_row("chat", auto=1.0, suite="irregular"),
    ]
    titles = [tables.title(group) for group in make_record(*rows).groups()]
    assert len(set(titles)) == len(rows)
    assert titles[1] == "Decode, 32 query heads, 8 KV heads, page size 1"
    headings = [line for line in tables.markdown(make_record(*rows)).splitlines() if line.startswith("#")]
    assert headings == [f"### {title}" for title in titles]


def test_ceilings_of_the_run_stand_beside_the_fixed_ones(make_record):
    measured = Ceilings(read_tb_per_s=4.321, copy_tb_per_s=3.9, matmul_tflops=701.6)
    line = tables.ceilings(make_record(ceilings=measured))
    assert "roof: 4.47 TB/s, 790 TFLOP/s" in line
    assert "reads 4.32 TB/s" in line
    assert "702 TFLOP/s" in line
    assert tables.ceilings(make_record()) == "roof: 4.47 TB/s, 790 TFLOP/s"
