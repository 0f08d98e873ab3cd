"""The merge kernel against float64 arithmetic; on a machine without a GPU in Triton's interpreter."""

import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"


def expected(partials, partial_lse, sinks, v_scale):
    partials, partial_lse = partials.double(), partial_lse.double()
    seen = partial_lse > -math.inf
    weight = torch.where(seen, torch.exp2(partial_lse), 0.0)
    total = weight.sum(0)
    value = torch.where(seen[..., None], partials * weight[..., None], 0.0).sum(0) * v_scale
    if sinks is not None:
        total = total + torch.exp(sinks.double())
    out = torch.where(total[..., None] > 0, value / total[..., None], 0.0)
    return out, torch.log2(total)


CASES = {
    "two levels": {},
    "one level": {"levels": 1},
    "seven levels": {"levels": 7},
    "one head": {"heads": 1},
    "three heads": {"heads": 3},
    "96 heads": {"heads": 96, "rows": 3},
    "128 heads": {"heads": 128, "rows": 3},
    "head_dim 256": {"dim": 256, "rows": 4},
    "float16": {"dtype": torch.float16},
    "row map": {"mapped": True},
    "sinks": {"sinks": True},
    "sinks and map and scale": {"sinks": True, "mapped": True, "v_scale": 0.25},
    "wide out": {"wide": True},
    "idle levels": {"levels": 4, "idle": [1, 3]},
    "idle levels and sinks": {"levels": 2, "idle": [0], "sinks": True, "mapped": True},
}


def check_case(
    levels=2, rows=9, heads=8, dim=64, dtype=torch.bfloat16, mapped=False, sinks=False, v_scale=1.0, wide=False, idle=()
):
    from flashinfer_cascade.runtime.kernels.merge import merge

    torch.manual_seed(levels * rows * heads)
    partials = torch.randn(levels, rows, heads, dim, dtype=dtype, device=DEVICE)
    partial_lse = 20 * torch.randn(levels, rows, heads, device=DEVICE)
    partial_lse[0, 0] = -math.inf  # a level that saw nothing
    partial_lse[:, 1] = -math.inf  # a row that saw nothing anywhere
    partial_lse[-1, 2] = -math.inf
    active = None
    if idle:
        active = torch.ones(levels, dtype=torch.int32, device=DEVICE)
        active[idle] = 0
        stale_lse, partial_lse = partial_lse, partial_lse.clone()
        partial_lse[idle] = -math.inf
    partials[partial_lse == -math.inf] = math.nan  # never to be read
    sink = torch.randn(heads, device=DEVICE) if sinks else None
    row_map = torch.randperm(rows, dtype=torch.int32, device=DEVICE) if mapped else None
    out = torch.full((rows, heads, dim + (8 if wide else 0)), math.nan, dtype=dtype, device=DEVICE)[..., :dim]
    lse = torch.full((rows, heads), math.nan, device=DEVICE)
    given_lse = stale_lse if idle else partial_lse
    merge(partials, given_lse, out, row_map=row_map, active=active, sinks=sink, v_scale=v_scale, lse=lse)
    value, total = expected(partials, partial_lse, sink, v_scale)
    order = slice(None) if row_map is None else row_map.long()
    got, got_lse = out[order].double(), lse[order].double()
    tolerance = torch.finfo(dtype).eps
    assert torch.allclose(got, value, rtol=tolerance, atol=tolerance)
    assert torch.allclose(got_lse, total, rtol=1e-5, atol=1e-5)
    again = torch.empty_like(out)
    merge(partials, given_lse, again, row_map=row_map, active=active, sinks=sink, v_scale=v_scale)
    assert torch.equal(again, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_merge_on_the_gpu(case):
    check_case(**case)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs the compiled kernel")
def test_merge_in_the_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    script = f"import sys; sys.path[:0] = {[os.path.dirname(__file__), *sys.path]!r}\n" + (
        "from test_merge import CASES, check_case\n"
        "for name, case in CASES.items():\n    check_case(**case)\n    print(name)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == list(CASES)
