"""The harness without a GPU: what it builds and judges, on the reference executor; how records grow."""

import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from flashinfer_cascade import CascadeError, InvalidBatchError  # noqa: E402
from flashinfer_cascade.bench import candidates, harness, timing  # noqa: E402
from flashinfer_cascade.bench.cases import Case, select  # noqa: E402
from flashinfer_cascade.bench.results import read_record, write_record  # noqa: E402
from flashinfer_cascade.bench.timing import Time  # noqa: E402
from flashinfer_cascade.bench.workloads import append  # noqa: E402

S4 = Case("decode", "S4", 8, 2, 16, "bfloat16")
HEAD = {
    "hardware": {"gpu": "NVIDIA Test", "num_sms": 100},
    "versions": {"flashinfer": "1", "torch": "2", "cuda": "3"},
    "commit": "abc",
    "date": "2026-01-01",
}


class Rerun:
    """What `timing.capture` returns, without a graph."""

    def __init__(self, call, caches):
        self.call, self.cache = call, caches[-1]
        self.call(self.cache)

    def rerun(self):
        return self.call(self.cache)


@pytest.fixture
def cpu(monkeypatch):
    """A harness on the CPU whose candidates take 1, 2, ... microseconds."""
    monkeypatch.setattr(timing, "MIN_ROTATED_BYTES", 1)
    monkeypatch.setattr(harness, "capture", Rerun)
    monkeypatch.setattr(
        harness,
        "take_turns",
        lambda captured, repeats, replays: {
            name: Time(number, (number - 0.5, number, number + 0.25)) for number, name in enumerate(captured, 1)
        },
    )
    monkeypatch.setattr(harness, "describe_machine", lambda commit: HEAD | ({"commit": commit} if commit else {}))
    return harness.Gpu(torch.device("cpu"), pool_bytes=2**22)


def test_a_row_has_times_choices_and_results_held_against_the_oracle(cpu):
    row = cpu.measure(S4)
    assert row.case == S4
    assert {"flat", "levels", "auto"} <= row.results.keys()
    assert row.results["flat"].us == 1.0
    assert (row.results["flat"].low_us, row.results["flat"].high_us) == (0.5, 1.25)
    assert row.wrong() == []
    assert all(0 < measured.max_error < row.error_budget for measured in row.results.values())
    assert (row.num_rows, row.checked_rows, row.repeats) == (4, 4, 5)
    assert row.choices.keys() == row.results.keys()
    assert row.choices["levels"].executor == "levels"
    assert row.choices["levels"].predicted_us["levels"] > 0
    assert all(choice.plan_us > 0 and choice.load_us > 0 for choice in row.choices.values())


def test_candidates_that_refuse_say_why(cpu, monkeypatch):
    monkeypatch.setitem(candidates.POLICIES, "levels", {"executor": "warp"})
    row = cpu.measure(S4)
    assert "levels" not in row.results
    assert row.refused["levels"].startswith("ValidationError: ")
    assert "run on CUDA GPUs, not on cpu" in row.refused["decode"]
    assert {"decode", "stock_default", "stock_fa2"} <= row.refused.keys()


def test_no_candidate_at_all_is_an_error(cpu, monkeypatch):
    def refuse(call, caches):
        raise RuntimeError("out of order")

    monkeypatch.setattr(harness, "capture", refuse)
    with pytest.raises(CascadeError, match=r"S4, 8/2 heads, page 16, bfloat16: no candidate ran: .*out of order"):
        cpu.measure(S4)


def test_a_wrong_result_is_seen(cpu, monkeypatch):
    real = candidates.CascadeRuntime.run

    def spoiled(self, q, cache, out):
        return real(self, q, cache.roll(1, 0), out=out)

    monkeypatch.setattr(candidates.CascadeRuntime, "run", spoiled)
    assert set(cpu.measure(S4).wrong()) >= {"flat", "levels", "auto"}


def test_a_result_that_was_not_written_is_seen(cpu, monkeypatch):
    monkeypatch.setattr(candidates.CascadeRuntime, "run", lambda self, q, cache, out: out.fill_(float("nan")))
    row = cpu.measure(S4)
    assert row.results["flat"].max_error is None
    assert "flat" in row.wrong()


@pytest.mark.parametrize(
    "case",
    [S4._replace(suite="fp8", kv_dtype="float8_e4m3fn"), S4._replace(page_size=1), S4._replace(suite="append")],
    ids=["fp8", "page 1", "append"],
)
def test_other_suites_are_right_too(cpu, case, monkeypatch):
    if case.suite == "append":  # those of the grid take minutes on a CPU
        work = append(3, 64, 5, 20)
        monkeypatch.setattr(Case, "build", lambda self: (work, work.config(8, 2)))
    row = cpu.measure(case)
    assert {"flat", "levels", "auto"} <= row.results.keys()
    assert row.wrong() == []
    assert ("prefill_fa3" in row.refused) is (case.suite == "append")
    assert ("decode" in row.refused) is (case.suite != "append")


def test_outputs_come_back_in_the_order_of_q():
    work, config = Case("irregular", "half", 8, 2, 16, "bfloat16").build()
    work = work.shuffled(seed=1)
    plan = candidates.CascadePlanner(config, candidates.PlannerPolicy(executor="stock", fold=False)).plan(
        work.block_tables, work.seq_lens
    )
    q = torch.randn(64, 8, 128).bfloat16()
    rank, rows = candidates._in_plan_order(plan, q)
    assert not torch.equal(rows, q)
    assert torch.equal(rows[rank], q)


def outcomes(*arguments, **more):
    """Workloads and what came of each: "row", the reason why there is none, or None."""
    ran = harness.run(*arguments, **more)
    return [(case.workload, outcome if outcome is None or isinstance(outcome, str) else "row") for case, outcome in ran]


CASES = select(["decode"], ["P1", "P2", "P3"])


def test_every_row_is_kept_as_soon_as_there_is_one(tmp_path, make_row, make_record):
    path = tmp_path / "record.json"
    record = make_record()

    def measure(case):
        if case.workload == "P3":
            raise KeyboardInterrupt("stopped by hand")
        return make_row(case.workload, auto=1.0)

    with pytest.raises(KeyboardInterrupt, match="stopped by hand"):
        list(harness.run(CASES, record, path, measure))
    assert [row.workload for row in read_record(path).rows] == ["P1", "P2"]


def test_a_resumed_record_measures_the_rest_alone(tmp_path, monkeypatch, make_row, make_record):
    monkeypatch.setattr(harness, "describe_machine", lambda commit: HEAD)
    path = tmp_path / "record.json"
    write_record(make_record(make_row("P2", auto=7.0), left_out={str(CASES[0]): "the deadline was reached"}), path)
    record = harness.begin_record(path, resume=True, commit=None)
    found = outcomes(CASES, record, path, lambda case: make_row(case.workload, auto=1.0))
    assert found == [("P1", "row"), ("P2", None), ("P3", "row")]
    kept = read_record(path)
    assert [(row.workload, row.results["auto"].us) for row in kept.rows] == [("P2", 7.0), ("P1", 1.0), ("P3", 1.0)]
    assert kept.left_out == {}


def test_what_does_not_fit_or_comes_too_late_is_left_out_with_a_reason(tmp_path, make_row, make_record):
    record = make_record()

    def measure(case):
        if case.workload == "P1":
            raise MemoryError("2 caches of 99 GB exceed the pool")
        return make_row(case.workload, auto=1.0)

    assert [name for name, outcome in outcomes(CASES, record, None, measure) if outcome == "row"] == ["P2", "P3"]
    assert record.left_out == {str(CASES[0]): "MemoryError: 2 caches of 99 GB exceed the pool"}
    late = make_record()
    found = outcomes(CASES, late, None, measure, deadline=time.monotonic() - 1)
    assert found == [(name, "the deadline was reached") for name in ("P1", "P2", "P3")]
    assert late.rows == []
    assert len(late.left_out) == 3


def test_records_of_other_machines_are_not_continued(tmp_path, monkeypatch, make_row, make_record):
    monkeypatch.setattr(harness, "describe_machine", lambda commit: HEAD | {"commit": commit or "abc"})
    path = tmp_path / "record.json"
    assert harness.begin_record(path, resume=True, commit=None).rows == []
    write_record(make_record(make_row(auto=1.0)), path)
    with pytest.raises(InvalidBatchError, match=r"record\.json exists: continue it with --resume"):
        harness.begin_record(path, resume=False, commit=None)
    with pytest.raises(InvalidBatchError, match="was measured with commit abc, but here it is def"):
        harness.begin_record(path, resume=True, commit="def")
    assert len(harness.begin_record(path, resume=True, commit=None).rows) == 1


def test_the_read_kernel_reads_everything():
    pytest.importorskip("triton", reason="triton is not installed")
    code = """
import torch
from flashinfer_cascade.bench import ceilings
ceilings.BLOCK, ceilings.ROUNDS = 64, 4
x = torch.arange(64 * 4 * 3, dtype=torch.int32)
assert torch.equal(ceilings.read_all(x), x.view(3, -1).sum(1, dtype=torch.int32))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gpu_keeps_one_pool_for_a_dtype(cpu):
    pool = cpu._caches(torch.bfloat16)
    assert cpu._caches(torch.bfloat16) is pool
    assert cpu._caches(torch.float8_e4m3fn) is not pool
    assert cpu._caches(torch.float8_e4m3fn).dtype == torch.float8_e4m3fn
