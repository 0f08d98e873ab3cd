"""``flashinfer-cascade bench`` as its users see it, with made-up times."""

import json

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from flashinfer_cascade.bench import command, harness  # noqa: E402
from flashinfer_cascade.bench.results import Ceilings, read_record, write_record  # noqa: E402
from flashinfer_cascade.cli import app  # noqa: E402

HEAD = {
    "hardware": {"gpu": "NVIDIA Test", "num_sms": 100},
    "versions": {"flashinfer": "1", "torch": "2", "cuda": "3"},
    "commit": "abc",
    "date": "2026-01-01",
}


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def complaint(*arguments):
    """The one line that a refused call prints."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def gpu(monkeypatch, make_row):
    """A made-up GPU; the cases that it measured."""
    measured = []

    def measure(self, case):
        measured.append((case, self.repeats, self.pool_bytes))
        heads = (case.num_qo_heads, case.num_kv_heads)
        return make_row(
            case.workload, 10.0, case.suite, heads, case.page_size, case.kv_dtype, flat=40.0, stock_fa2=30.0, auto=20.0
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(harness, "describe_machine", lambda commit: HEAD | ({"commit": commit} if commit else {}))
    monkeypatch.setattr(harness.Gpu, "measure", measure)
    found = Ceilings(read_tb_per_s=4.4, copy_tb_per_s=3.9, matmul_tflops=700.0)
    monkeypatch.setattr(command, "_ceilings", lambda device: found)
    return measured


def test_rows_come_as_they_are_measured_and_tables_at_the_end(tmp_path, gpu):
    path = tmp_path / "record.json"
    result = invoke("--workloads", "P1,P10,S1", "--json", path)
    assert result.exit_code == 0, result.output
    assert "NVIDIA Test, FlashInfer 1, torch 2, 2026-01-01, commit abc; roof: 4.47 TB/s" in result.stdout
    assert "reads 4.40 TB/s" in result.stdout
    assert "P10, 32/8 heads, page 16, bfloat16: roof 10.0 stock_fa2 30.0 flat 40.0 auto 20.0" in result.stdout
    assert "Geometric means over 2 trees" in result.stdout
    assert "1.50x as fast as the best stock way" in result.stdout
    assert f"3 rows, 0 s, in {path}" in result.stdout
    record = read_record(path)
    assert [row.workload for row in record.rows] == ["P1", "P10", "S1"]
    assert (record.commit, record.ceilings.matmul_tflops) == ("abc", 700.0)
    assert {(repeats, pool) for _, repeats, pool in gpu} == {(5, 40_000_000_000)}


def test_options_reach_the_cases(gpu):
    result = invoke(
        "--suite", "decode,fp8", "--workloads", "P1,P3", "--heads", "64/8,16/1", "--page-size", "16,1",
        "--pool-gb", 1, "--quick", "--commit", "def",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "commit def" in result.stdout
    cases = [case for case, *_ in gpu]
    assert len(cases) == len({case[1:] for case in cases}) == 2 * 2 * 2 * 2
    assert {(case.suite, case.kv_dtype) for case in cases} == {("decode", "bfloat16"), ("fp8", "float8_e4m3fn")}
    assert {(repeats, pool) for _, repeats, pool in gpu} == {(3, 1_000_000_000)}
    gpu.clear()
    assert invoke("--kv-dtype", "float8_e5m2", "--quick").exit_code == 0
    assert {case.workload for case, *_ in gpu} == {"P1", "P3", "P10", "P19", "S1", "S4"}
    assert {case.kv_dtype for case, *_ in gpu} == {"float8_e5m2"}


def test_resume_measures_what_is_missing(tmp_path, gpu):
    path = tmp_path / "record.json"
    assert invoke("--workloads", "P1", "--json", path).exit_code == 0
    assert "exists: continue it with --resume" in complaint("--workloads", "P1,P2", "--json", path)
    assert invoke("--workloads", "P1,P2", "--json", path, "--resume").exit_code == 0
    assert [case.workload for case, *_ in gpu] == ["P1", "P2"]
    assert "measured with commit abc" in complaint("--json", path, "--resume", "--commit", "def")


def test_a_deadline_leaves_the_rest_out(tmp_path, gpu):
    path = tmp_path / "record.json"
    result = invoke("--workloads", "P1,P2", "--json", path, "--deadline", "-1")
    assert result.exit_code == 0
    assert "P1, 32/8 heads, page 16, bfloat16: left out: the deadline was reached" in result.stdout
    assert gpu == []
    assert len(read_record(path).left_out) == 2


def test_a_wrong_result_of_ours_fails_and_one_of_flashinfer_does_not(monkeypatch, gpu):
    right = harness.Gpu.measure

    def spoil(name):
        def measure(self, case):
            row = right(self, case)
            bad = row.results[name].model_copy(update={"max_error": 1.0})
            return row.model_copy(update={"results": row.results | {name: bad}})

        monkeypatch.setattr(harness.Gpu, "measure", measure)

    spoil("auto")
    result = invoke("--workloads", "P1")
    assert result.exit_code == 1
    assert "WRONG: auto" in result.stdout
    spoil("stock_fa2")
    result = invoke("--workloads", "P1")
    assert result.exit_code == 0
    assert "Beyond the error budget: P1 stock_fa2" in result.stdout


def test_plotting_measures_nothing(tmp_path, make_row, make_record):
    write_record(make_record(make_row(flat=2.0, auto=1.0)), tmp_path / "record.json")
    result = invoke("--plot", tmp_path / "record.json", "--out", tmp_path / "images")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / "images" / "bench-decode-32-8.svg")]
    assert "<svg" in (tmp_path / "images" / "bench-decode-32-8.svg").read_text()
    (tmp_path / "stale.json").write_text(json.dumps({"results": []}))
    assert "stale.json is no record of this version" in complaint("--plot", tmp_path / "stale.json")
    assert "No such file" in complaint("--plot", tmp_path / "none.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "fast"], "no suite 'fast': choose from decode, heads"),
        (["--workloads", "P99"], "no workload 'P99' in decode: choose from P1"),
        (["--heads", "32"], "--heads '32' is not N/N: give positive numbers"),
        (["--heads", "32/x"], "--heads '32/x' is not N/N"),
        (["--page-size", "0"], "--page-size '0' is not N: give positive numbers"),
        (["--kv-dtype", "int8"], "kv_dtype 'int8': choose from"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    assert message in complaint(*arguments)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device: bench measures on a GPU" in complaint("--workloads", "P1")
