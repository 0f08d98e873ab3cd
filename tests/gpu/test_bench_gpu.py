"""The benchmark on a GPU: graphs, times above the roof, every candidate right."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    import torch

    from flashinfer_cascade.bench.harness import Gpu

    return Gpu(torch.device("cuda", 0), pool_bytes=10**9, repeats=2, replays=2)


@pytest.mark.parametrize(
    ("suite", "workload", "page_size"), [("decode", "P4", 16), ("append", "A1", 16), ("decode", "S1", 1)]
)
def test_a_case_is_measured(gpu, suite, workload, page_size):
    from flashinfer_cascade.bench.cases import Case
    from flashinfer_cascade.bench.results import OURS

    row = gpu.measure(Case(suite, workload, 32, 8, page_size, "bfloat16"))
    plain = {"prefill_fa2"} if suite == "append" else {"decode"}
    assert {"flat", "levels", "auto", "stock_default", "stock_fa2"} | plain <= row.results.keys(), row.refused
    assert not set(row.wrong()) & set(OURS)
    assert row.checked_rows == row.num_rows
    # A cache that stayed in L2 would be read faster than HBM can.
    assert all(measured.us > 0.9 * row.roof_us for measured in row.results.values())


def test_ceilings_are_near_those_of_the_roof():
    import torch

    from flashinfer_cascade.bench.ceilings import measure_ceilings

    found = measure_ceilings(torch.device("cuda", 0))
    assert found.read_tb_per_s > 0.5
    assert found.copy_tb_per_s > 0.5
    assert found.matmul_tflops > 50
