"""The native core computes what Python computes, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CascadeConfig, CascadePlanner, PlannerPolicy, native
from flashinfer_cascade.profile import PROFILES

POLICIES = (
    PlannerPolicy(),
    PlannerPolicy(min_speedup=1.0),
    PlannerPolicy(executor="levels"),
    PlannerPolicy(executor="levels", fold=False),
    PlannerPolicy(executor="levels", max_levels=2),
    PlannerPolicy(executor="flat"),
)


def random_tree(rng, num_requests, longest):
    """Tables that branch anywhere, runs from short to long, most of them shared by many."""
    tables, fresh = [], 0
    for _ in range(num_requests):
        prefix = []
        if tables and rng.random() < 0.8:
            parent = tables[int(rng.integers(len(tables)))]
            prefix = parent[: int(len(parent) * rng.choice([0.3, 0.6, 0.9, 1.0]))]
        own = int(rng.integers(1, longest + 1))
        tables.append([*prefix, *range(fresh, fresh + own)])
        fresh += own
    return tables


@given(
    seed=st.integers(0, 2**32 - 1),
    num_requests=st.sampled_from([1, 3, 20, 150]),
    longest=st.sampled_from([1, 8, 100, 600]),
    heads=st.sampled_from([(32, 8), (32, 32), (64, 8), (16, 1), (40, 8)]),
    head_dim=st.sampled_from([128, 128, 64, 256]),
    kv_dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    page_size=st.sampled_from([1, 16, 64, 300]),
    policy=st.sampled_from(POLICIES),
    profile=st.sampled_from(list(PROFILES)),
    rows=st.sampled_from([1, 1, 4, 40]),
    window=st.sampled_from([-1, -1, -1, 10**6]),
)
def test_plans_are_the_same_with_and_without(
    seed, num_requests, longest, heads, head_dim, kv_dtype, page_size, policy, profile, rows, window
):
    rng = np.random.default_rng(seed)
    config = CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        window_left=window,
        max_kv_pages=2**20,
        max_kv_indices=2**24,
    )
    tables = random_tree(rng, num_requests, longest)
    lens = np.array([len(table) * page_size for table in tables])
    lens -= rng.integers(0, page_size, len(lens))
    lens[rng.random(len(lens)) < 0.05] = 0
    qo_lens = np.minimum(rng.integers(1, rows + 1, len(lens)), np.maximum(lens, 1))
    plans = [
        CascadePlanner(config, policy, profile, native=native).plan(tables, lens, qo_lens) for native in (True, False)
    ]
    assert plans[0] == plans[1]
    for fast, slow in zip(plans[0].parts, plans[1].parts, strict=True):
        for name in ("reason", "predicted_us", "request_end", "row_begin", "row_end", "num_levels", "causal"):
            assert getattr(fast, name) == getattr(slow, name), name
        assert fast.kept.tolist() == slow.kept.tolist()
    if num_requests < 100:
        session = CascadePlanner(config, policy, profile).session()
        for r in rng.permutation(num_requests).tolist():
            session.add(r, tables[r], int(lens[r]))
        session.reorder(range(num_requests))
        assert session.plan(qo_lens) == plans[1]


def test_a_core_of_another_source_is_not_loaded(monkeypatch, tmp_path):
    source = tmp_path / "core.c"
    source.write_text("another")
    monkeypatch.setattr(native, "SOURCE", source)
    assert native.load_core.__wrapped__() is None
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    assert native.load_core.__wrapped__() is None


@pytest.mark.parametrize("wanted", [True, False])
def test_a_planner_says_whether_it_uses_the_core(wanted):
    config = CascadeConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=4, dtype="bfloat16")
    assert CascadePlanner(config, native=wanted).native == (wanted and native.load_core() is not None)
