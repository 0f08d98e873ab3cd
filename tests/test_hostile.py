"""Whatever a caller gives, errors are this package's own: each argument of the interface in turn is nonsense."""

import contextlib
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from flashinfer_cascade import (
    CascadeConfig,
    CascadeError,
    CascadePlanner,
    CascadeRuntime,
    CsrTables,
    PlanCapacity,
    capture_cuda_graphs,
)
from flashinfer_cascade.integrations import EngineAdapter
from flashinfer_cascade.testing import make_kv_cache, make_q

CFG = CascadeConfig(
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=4,
    dtype="bfloat16",
    max_batch_size=8,
    max_num_rows=32,
    max_kv_pages=20,
)
PLANNER, RUNTIME = CascadePlanner(CFG), CascadeRuntime(CFG, "cpu")
TABLES, LENS = [[0], [1]], [3, 3]
PLAN = PLANNER.plan(TABLES, LENS)
Q, CACHE = make_q(CFG, 2), make_kv_cache(CFG, 20)
STATE, ADAPTER = RUNTIME.graph_state(2), EngineAdapter(CFG, "cpu")

NONSENSE = [
    *(None, -1, 5, 2**80, 3.5, math.nan, True, "x", b"x", object(), print, CFG, PLAN),
    *([], [None], [[1]], [2**80], (1, 2), {}, {"a": 1}, {"a"}, iter([1])),
    *(np.zeros(3), np.array(5), np.array(["x"]), torch.zeros(2), torch.zeros(2, device="meta")),
]


def session():
    made = PLANNER.session()
    made.add("a", [0, 1], 7, computed_len=6)
    made.add("b", [0, 2], 7, computed_len=6)
    return made


def capture(**changes):
    arguments = {"runtime": RUNTIME, "step_fn": lambda given: given["q"], "inputs": {"q": Q}, "batch_sizes": [2]}
    return capture_cuda_graphs(**(arguments | {"progress": False} | changes))


POOL = capture()


def run(**changes):
    RUNTIME.load(PLAN)
    RUNTIME.run(**({"q": Q, "kv_cache": CACHE} | changes))


CALLS = {
    "plan: block_tables": lambda x: PLANNER.plan(x, LENS),
    "plan: a table": lambda x: PLANNER.plan([[0], x], LENS),
    "plan: a page": lambda x: PLANNER.plan([[0], [x]], LENS),
    "plan: kv_indptr": lambda x: PLANNER.plan(CsrTables(x, [0, 1]), LENS),
    "plan: kv_indices": lambda x: PLANNER.plan(CsrTables([0, 1, 2], x), LENS),
    "plan: seq_lens": lambda x: PLANNER.plan(TABLES, x),
    "plan: qo_lens": lambda x: PLANNER.plan(TABLES, LENS, x),
    "plan: capacity": lambda x: PLANNER.plan(TABLES, LENS, capacity=x),
    "plan_groups: configs": lambda x: PLANNER.plan_groups(x, TABLES, LENS),
    "plan_groups: a config": lambda x: PLANNER.plan_groups([x], TABLES, LENS),
    "planner: config": CascadePlanner,
    "planner: policy": lambda x: CascadePlanner(CFG, x),
    "planner: profile": lambda x: CascadePlanner(CFG, profile=x),
    "capacity": lambda x: PlanCapacity(num_rows=x),
    "session: add id": lambda x: session().add(x, [1], 3),
    "session: add pages": lambda x: session().add("c", x, 3),
    "session: add seq_len": lambda x: session().add("c", [1], x),
    "session: add computed_len": lambda x: session().add("c", [1], 3, computed_len=x),
    "session: fork": lambda x: session().fork(x, "c"),
    "session: fork to": lambda x: session().fork("a", x),
    "session: remove": lambda x: session().remove(x),
    "session: append": lambda x: session().append("a", x),
    "session: append pages": lambda x: session().append("a", 0, x),
    "session: step": lambda x: session().step(x),
    "session: step page": lambda x: session().step({"a": x}),
    "session: step ids": lambda x: session().step(ids=x),
    "session: truncate": lambda x: session().truncate("a", x),
    "session: replace_page index": lambda x: session().replace_page("a", x, 3),
    "session: replace_page": lambda x: session().replace_page("a", 0, x),
    "session: reorder": lambda x: session().reorder(x),
    "session: block_table": lambda x: session().block_table(x),
    "session: plan qo_lens": lambda x: session().plan(x),
    "session: plan capacity": lambda x: session().plan(capacity=x),
    "runtime: config": lambda x: CascadeRuntime(x, "cpu"),
    "runtime: device": lambda x: CascadeRuntime(CFG, x),
    "runtime: load": RUNTIME.load,
    "runtime: using": lambda x: RUNTIME.using(x).__enter__(),
    "runtime: graph_state": RUNTIME.graph_state,
    "runtime: graph_state num_tokens": lambda x: RUNTIME.graph_state(num_tokens=x),
    "runtime: graph_state max_requests": lambda x: RUNTIME.graph_state(num_tokens=4, max_requests=x),
    "runtime: graph_state shape": lambda x: RUNTIME.graph_state(2, shape=x),
    "run: half a cache": lambda x: run(kv_cache=(x, CACHE[:, 1])),
    "state: load": STATE.load,
    "pool: capacity": POOL.capacity,
    "pool: capacity num_requests": lambda x: POOL.capacity(2, x),
    "pool: load": POOL.load,
    "pool: replay": lambda x: POOL.replay(x, q=Q),
    "pool: replay an input": lambda x: POOL.replay(PLAN, q=x),
    "pool: run an input": lambda x: POOL.run(PLAN, q=x),
    "capture: a batch size": lambda x: capture(batch_sizes=[x]),
    "capture: an input": lambda x: capture(inputs={"q": x}),
    "plan: levels": PLAN.levels,
    "plan: to_flashinfer part": lambda x: PLAN.to_flashinfer(part=x),
    "adapter: reserve": ADAPTER.reserve,
    "adapter: graph_size": ADAPTER.graph_size,
    "adapter: plan graph": lambda x: ADAPTER.plan(TABLES, LENS, graph=x),
}
CALLS |= {
    f"run: {name}": lambda x, name=name: run(**{name: x})
    for name in ("q", "kv_cache", "part", "k_scale", "v_scale", "sinks", "out")
}
CALLS |= {
    f"state: {name}": lambda x, name=name: STATE.run(**({"q": Q, "kv_cache": CACHE} | {name: x}))
    for name in ("q", "kv_cache", "k_scale", "v_scale", "sinks", "out")
}
CALLS |= {
    f"capture: {name}": lambda x, name=name: capture(**{name: x})
    for name in ("runtime", "inputs", "batch_sizes", "token_sizes", "max_requests", "shapes", "lazy")
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_error_but_ours(call):
    for value in NONSENSE:
        with contextlib.suppress(CascadeError, ValidationError):
            call(value)
