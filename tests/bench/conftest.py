"""Rows and records as a benchmark would write them; fixtures, for the test modules cannot import from here."""

from __future__ import annotations

import pytest

from flashinfer_cascade.bench.results import SCHEMA, Choice, Measured, Record, Row


def _row(workload="P1", roof_us=10.0, suite="decode", heads=(32, 8), page_size=16, kv_dtype="bfloat16", **us):
    """A row with times ``name=us`` or ``name=(us, low, high)``, 1% around us by default."""
    spreads = {name: t if isinstance(t, tuple) else (t, 0.99 * t, 1.01 * t) for name, t in us.items()}
    choice = Choice(
        executor="levels", reason="because", num_levels=2, backends=("fa2", "decode"), predicted_us={"levels": 20.0},
        plan_us=300.0, load_us=400.0,
    )  # fmt: skip
    return Row(
        suite=suite,
        workload=workload,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        page_size=page_size,
        kv_dtype=kv_dtype,
        description=f"made up {workload}",
        num_requests=4,
        num_rows=4,
        roof_us=roof_us,
        repeats=5,
        checked_rows=4,
        error_budget=0.006,
        results={name: Measured(us=t[0], low_us=t[1], high_us=t[2], max_error=0.003) for name, t in spreads.items()},
        refused={},
        choices={"auto": choice} if "auto" in us else {},
    )


@pytest.fixture
def make_row():
    return _row


@pytest.fixture
def make_record():
    def make(*rows, **fields):
        head = {
            "schema_version": SCHEMA,
            "hardware": {"gpu": "NVIDIA Test", "num_sms": 100},
            "versions": {"flashinfer": "1", "torch": "2", "cuda": "3"},
            "commit": "abc",
            "date": "2026-01-01",
        }
        return Record(**(head | fields), rows=list(rows))

    return make
