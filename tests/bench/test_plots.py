"""Plots are well-formed, hold every row, and are the same file every time."""

import xml.etree.ElementTree as ET

from flashinfer_cascade.bench.plots import plots, write_plots

NS = {"svg": "http://www.w3.org/2000/svg"}


def drawn(content):
    root = ET.fromstring(content)
    return [element.text for element in root.iter(f"{{{NS['svg']}}}text")], [
        element.text for element in root.iter(f"{{{NS['svg']}}}title")
    ]


def test_each_group_has_a_plot_with_every_row_and_time(make_row, make_record):
    rows = [
        make_row("P1", roof_us=10.0, flat=40.0, stock_fa2=30.0, levels=12.0, auto=15.0),
        make_row("P2", roof_us=10.0, flat=40.0, auto=50.0),
        make_row("P3", roof_us=10.0, levels=9.9, flat=10.0),
        make_row("A1", suite="append", prefill_fa2=30.0, prefill_fa3=30.0, auto=30.0),
    ]
    made = plots(make_record(*rows))
    assert list(made) == ["bench-decode-32-8.svg", "bench-append-32-8.svg"]
    texts, titles = drawn(made["bench-decode-32-8.svg"])
    assert {"P1", "P2", "P3", "Decode, 32 query heads, 8 KV heads", "stock fa2", "flat", "levels", "auto"} <= set(texts)
    assert "A1" not in texts
    assert {"2.00x", "0.80x, lost", "-"} <= set(texts)  # P3 has no auto
    assert "P1, levels: 12.0 us, 1.20x roof" in titles
    assert "P1: 2.00x as fast as stock_fa2" in titles
    for row in rows[:3]:
        assert sum(title.startswith(f"{row.workload}, ") for title in titles) == len(row.results)
    texts, _ = drawn(made["bench-append-32-8.svg"])
    assert {"A1", "prefill fa2", "prefill fa3", "1.00x"} <= set(texts)


def test_marks_stay_within_the_picture(make_row, make_record):
    rows = [make_row(roof_us=0.1, flat=900.0, auto=0.09), make_row("P2", roof_us=100.0, flat=100.0, auto=100.0)]
    (content,) = plots(make_record(*rows)).values()
    root = ET.fromstring(content)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{{{NS['svg']}}}rect"):
        if box.get("width") != "100%":
            assert float(box.get("x")) >= 0
            assert float(box.get("x")) + float(box.get("width")) <= width
            assert 0 <= float(box.get("y")) <= height


def test_a_record_always_draws_the_same(tmp_path, make_row, make_record):
    record = make_record(make_row(flat=40.0, auto=15.0), make_row(flat=40.0, auto=15.0, page_size=1))
    paths = write_plots(record, tmp_path / "made")
    assert [path.name for path in paths] == ["bench-decode-32-8.svg", "bench-decode-32-8-page1.svg"]
    again = plots(record.model_validate_json(record.model_dump_json()))
    assert {path.name: path.read_text() for path in paths} == again
