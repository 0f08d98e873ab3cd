"""What CUDA graphs cost and gain, on a GPU, and the document that shows it.

python scripts/bench_graphs.py --json PATH [--deadline SECONDS]
python scripts/bench_graphs.py --write      put the tables of the committed record into docs/cuda_graphs.md
python scripts/bench_graphs.py --check      fail when docs/cuda_graphs.md shows others

Attention: microseconds a layer, CUDA-graph replay over rotating KV caches, turn and turn about, the median of five
repeats: a graph of the plan's own kernels, the graph that a pool picks, the one-for-all shape, FlashInfer's own wrapper
in a graph. Decode: host time of steps that a session plans. Model: 8 layers of Llama-8B's widths, one graph a bucket, a
flat pool beside a cascading one.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np

from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy, capture_cuda_graphs
from flashinfer_cascade.bench.records import describe_machine, machine_line, put_table
from flashinfer_cascade.bench.workloads import IRREGULAR, grid, irregular

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "records" / "h200_graphs.json"
DOCUMENT = ROOT / "docs" / "cuda_graphs.md"

ATTENTION = ["S1", "S2", "S3", "P1", "P2", "P3", "P4", "P6", "P10", "P12", "P18", "P19", "tool", "sample8"]
MODEL = ["S1", "P4", "P10", "P2", "tool", "P19"]
BUCKETS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
DECODE = [(64, 8192), (256, 1024), (256, 8192), (256, 65536)]
LAYERS, HIDDEN, INNER, VOCABULARY = 8, 4096, 14336, 32000


def workload(name):
    return irregular(name) if name in IRREGULAR else grid([name])[0]


def config_of(work, **changes):
    return CascadeConfig(**(work.config().model_dump() | changes))


def median_us(call, times=60):
    import torch

    spans = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        spans.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(spans), 1)


def measure_attention(name, pool):
    import torch

    from flashinfer_cascade.bench.timing import measure
    from flashinfer_cascade.runtime import StockShape
    from flashinfer_cascade.runtime.shapes import make_bucket
    from flashinfer_cascade.testing import dense_attention, error_budget, plain_attention, relative_errors

    work = workload(name)
    rows = next(size for size in BUCKETS if size >= work.num_rows)
    config = config_of(work, max_batch_size=rows, max_num_rows=rows)
    caches = pool.caches(config, work.num_pages)
    q = torch.randn(rows, config.num_qo_heads, 128, device="cuda", dtype=torch.bfloat16)
    planner = CascadePlanner(config)
    plan = planner.plan(work.block_tables, work.seq_lens)
    bucket = make_bucket(config, rows)
    runtime = CascadeRuntime(config)
    calls, outs, host, shapes = {}, {}, {}, {}

    def add(key, run):
        outs[key] = torch.full_like(q, math.nan)
        calls[key] = run

    runtime.load(plan)
    live = q[: work.num_rows]
    add("own", lambda cache: runtime.run(live, cache, out=outs["own"][: work.num_rows]))

    def add_state(key, state, state_plan):
        state.load(state_plan)
        laid = state.lay(state_plan, state_plan.levels())
        # What a step does: find the fit, then fill and copy.
        host[key] = median_us(lambda: state.load(state_plan))
        shapes[key] = [str(state.shape), laid.distance]
        add(key, lambda cache: state.run(q, cache, out=outs[key]))

    states = runtime.graph_states([(bucket, shape) for shape in runtime.default_graph_shapes(bucket)])
    laid = [(state, state.lay(plan, plan.levels())) for state in states]
    picked = min(((state, fit) for state, fit in laid if fit), key=lambda pair: pair[1].distance)[0]
    picked_alone = CascadeRuntime(config).graph_state(rows, shape=picked.shape)
    add_state("pool", picked_alone, plan)
    universal = CascadeRuntime(config).graph_state(rows)
    add_state("one_for_all", universal, planner.plan(work.block_tables, work.seq_lens, capacity=universal.capacity))
    every_node = CascadePlanner(config, PlannerPolicy(executor="levels", fold=False)).plan(
        work.block_tables, work.seq_lens
    )
    add_state("stock", CascadeRuntime(config).graph_state(rows, shape=StockShape(every_node.num_levels)), every_node)
    times = measure(calls, caches)

    chosen = sorted({i * (work.num_requests - 1) // 7 for i in range(8)})
    step = ([work.block_tables[r].tolist() for r in chosen], [int(work.seq_lens[r]) for r in chosen], [1] * len(chosen))
    oracle, _ = dense_attention(config, q[chosen], caches[0], *step)
    budget = error_budget(oracle, plain_attention(config, q[chosen], caches[0], *step))
    for call in calls.values():
        call(caches[0])
    torch.cuda.synchronize()
    return {
        "workload": name,
        "rows": work.num_rows,
        "bucket": rows,
        "kernels": plan.parts[0].backends,
        "shapes": shapes,
        "us": {key: [round(t.us, 2), *(round(x, 2) for x in t.spread_us)] for key, t in times.items()},
        "load_us": host,
        "plan_us": median_us(lambda: planner.plan(work.block_tables, work.seq_lens), 20),
        "max_error": {key: round(float(relative_errors(out[chosen], oracle).amax()), 5) for key, out in outs.items()},
        "error_budget": round(budget, 5),
    }


class Model:
    """Llama's layers over random weights; KV is written where each row's slot says."""

    def __init__(self, config, runtime, caches):
        import torch

        self.config, self.runtime, self.caches = config, runtime, caches
        generator = torch.Generator("cuda").manual_seed(0)

        def weight(rows, columns):
            made = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
            return made.mul_(columns**-0.5)

        heads, kv_heads, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self.layers = [
            (
                weight((heads + 2 * kv_heads) * dim, HIDDEN),
                weight(HIDDEN, heads * dim),
                weight(2 * INNER, HIDDEN),
                weight(HIDDEN, INNER),
            )
            for _ in range(LAYERS)
        ]
        self.embedding = weight(VOCABULARY, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step(self, inputs):
        import torch
        from torch.nn.functional import embedding, rms_norm, silu

        config = self.config
        heads, kv_heads, dim = config.num_qo_heads, config.num_kv_heads, config.head_dim
        x = embedding(inputs["token"], self.embedding)
        for (qkv, out, up, down), cache in zip(self.layers, self.caches, strict=True):
            q, k, v = (rms_norm(x, (HIDDEN,), self.norm) @ qkv.T).split(
                [heads * dim, kv_heads * dim, kv_heads * dim], 1
            )
            page, place = inputs["slot"] // config.page_size, inputs["slot"] % config.page_size
            cache[page, 0, place] = k.view(-1, kv_heads, dim)
            cache[page, 1, place] = v.view(-1, kv_heads, dim)
            attended = self.runtime.run(q.contiguous().view(-1, heads, dim), cache)
            x = x + attended.flatten(1) @ out.T
            gate, wide = (rms_norm(x, (HIDDEN,), self.norm) @ up.T).chunk(2, 1)
            x = x + (silu(gate) * wide) @ down.T
        return torch.argmax(rms_norm(x, (HIDDEN,), self.norm) @ self.embedding.T, 1)


def measure_step(pool, planner, work, given):
    """Times of one step through a pool: on the device alone, on the host alone, and of both in a loop."""
    import torch

    plan = planner.plan(work.block_tables, work.seq_lens)
    before = pool.stats.replays.copy()
    spans, host = [], []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host is done before the device begins
        begin.record()
        pool.replay(plan, **given)
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) * 1e3)
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        pool.replay(plan, **given)
        host.append((time.perf_counter() - started) * 1e6)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(30):
        pool.replay(planner.plan(work.block_tables, work.seq_lens), **given)
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - started) / 30 * 1e6
    ((_, shape),) = (pool.stats.replays - before).keys()
    return {
        "device_us": round(statistics.median(spans), 1),
        "plan_us": median_us(lambda: planner.plan(work.block_tables, work.seq_lens), 20),
        "replay_us": round(statistics.median(host), 1),
        "step_us": round(step_us, 1),
        "tokens_per_s": round(work.num_rows / step_us * 1e6),
        "shape": shape,
    }


def measure_model(names, deadline):
    import torch

    works = {name: workload(name) for name in names}
    rows = max(work.num_rows for work in works.values())
    buckets = [size for size in BUCKETS if any(size // 2 < work.num_rows <= size for work in works.values())]
    pages = max(work.num_pages for work in works.values()) + 1
    config = config_of(
        next(iter(works.values())),
        max_batch_size=max(buckets),
        max_num_rows=max(buckets),
        max_kv_pages=pages,
        max_kv_indices=max(int((-(-work.seq_lens // 16)).sum()) for work in works.values()),
    )
    runtime = CascadeRuntime(config)
    caches = [torch.randn(pages, 2, *config.page_shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = Model(config, runtime, caches)
    size = max(buckets)
    inputs = {
        "token": torch.zeros(size, dtype=torch.int64, device="cuda"),
        # Rows of padding write into a page that no request has.
        "slot": torch.full((size,), (pages - 1) * config.page_size, device="cuda"),
    }
    flat_only = lambda bucket: [shape for shape in runtime.default_graph_shapes(bucket) if not shape.shared]  # noqa: E731
    pools, captured = {}, {}
    for key, shapes in (("flat", flat_only), ("cascade", None)):
        begin = time.perf_counter()
        pools[key] = capture_cuda_graphs(
            runtime, model.step, inputs=inputs, batch_sizes=buckets, shapes=shapes, progress=False
        )
        captured[key] = {
            "graphs": pools[key].stats.captures,
            "seconds": round(time.perf_counter() - begin, 1),
            "megabytes": round(pools[key].memory_bytes / 1e6),
        }
        print(key, captured[key], flush=True)
    rows = []
    for name, work in works.items():
        if time.monotonic() > deadline:
            break
        pages_of = work.block_tables[np.arange(work.num_requests), (work.seq_lens - 1) // 16]
        given = {
            "token": torch.randint(VOCABULARY, (work.num_rows,), device="cuda"),
            "slot": torch.from_numpy(pages_of * 16 + (work.seq_lens - 1) % 16).cuda().long(),
        }
        row = {"workload": name, "rows": work.num_rows}
        for key, policy in (("flat", PlannerPolicy(executor="flat")), ("cascade", PlannerPolicy())):
            row[key] = measure_step(pools[key], CascadePlanner(config, policy), work, given)
        rows.append(row)
        print(row, flush=True)
    return {"captured": captured, "buckets": buckets, "layers": LAYERS, "rows": rows}


def measure_decode(requests, context, steps=60):
    """Host time of decode steps: a session, and replays of one attention call, the GPU always idle."""
    import torch
    from bench_session import Loop

    loop = Loop(requests, context, 0.0, native=True)
    runtime = CascadeRuntime(loop.config)
    cache = torch.zeros(loop.config.max_kv_pages, 2, *loop.config.page_shape, device="cuda", dtype=torch.bfloat16)
    q = torch.zeros(requests, loop.config.num_qo_heads, loop.config.head_dim, device="cuda", dtype=torch.bfloat16)
    pool = capture_cuda_graphs(
        runtime,
        lambda inputs: runtime.run(inputs["q"], cache),
        inputs={"q": q},
        batch_sizes=[requests],
        progress=False,
    )
    spans = {"session": [], "lay": [], "load": [], "replay": []}
    for _ in range(steps):
        planned_us, plan = loop.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pool.replay(plan, q=q)
        spans["replay"].append((time.perf_counter() - begin) * 1e6)
        spans["session"].append(planned_us)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        captured, laid = pool._select(plan)
        spans["lay"].append((time.perf_counter() - begin) * 1e6)
        begin = time.perf_counter()
        captured.state.load(plan, laid)
        spans["load"].append((time.perf_counter() - begin) * 1e6)
    return {
        "requests": requests,
        "context": context,
        "levels": plan.num_levels,
        "page_ids": int(plan.seg_num_pages.sum()),
        "host_us": {key: round(statistics.median(values[10:]), 1) for key, values in spans.items()},
        "p99_us": {key: round(float(np.quantile(values[10:], 0.99)), 1) for key, values in spans.items()},
    }


def run(arguments):
    import torch

    from flashinfer_cascade.bench.timing import KvPool

    end = time.monotonic() + arguments.deadline
    record = {
        "what": "attention: us a layer, [median, lowest, highest] of five interleaved repeats, bf16, 32/8 heads, "
        "head_dim 128, page_size 16; load_us: host time of GraphState.load, its search for a fit included; model: "
        f"{LAYERS} layers of Llama-8B's widths",
        **describe_machine(arguments.commit),
        "model": measure_model(arguments.model, end - 40),
        "decode": [],
        "attention": [],
    }
    for requests, context in DECODE:
        torch.cuda.empty_cache()
        record["decode"].append(measure_decode(requests, context))
        print(record["decode"][-1], flush=True)
    torch.cuda.empty_cache()
    pool = KvPool(24 * 10**9, torch.bfloat16, torch.device("cuda"))
    for name in arguments.attention:
        if time.monotonic() > end:
            print("deadline reached", flush=True)
            break
        row = measure_attention(name, pool)
        record["attention"].append(row)
        us = " ".join(f"{key} {value[0]:.1f}" for key, value in row["us"].items())
        print(f"{name}: {us} load {row['load_us']} {row['shapes']}", flush=True)
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def table(record):
    lines = [
        f"{machine_line(record)}.",
        "",
        "### Attention, microseconds a layer",
        "",
        "| workload | rows | graph of the plan's kernels | the pool's graph | its shape | one for all | stock graph "
        "| load, host | stock load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["attention"]:
        us, load = {key: value[0] for key, value in row["us"].items()}, row["load_us"]
        lines.append(
            f"| {row['workload']} | {row['rows']} | {us['own']:.1f} | {us['pool']:.1f} | {row['shapes']['pool'][0]} "
            f"| {us['one_for_all']:.1f} | {us['stock']:.1f} | {load['pool']:.0f} | {load['stock']:.0f} |"
        )
    model = record["model"]
    lines += [
        "",
        f"### A model of {model['layers']} layers, one graph a step",
        "",
        "| workload | rows | device, flat | device, cascade | host, flat | host, cascade | tokens/s, flat "
        "| tokens/s, cascade | gain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in model["rows"]:
        flat, cascade = row["flat"], row["cascade"]
        host = [f"{one['plan_us']:.0f} + {one['replay_us']:.0f}" for one in (flat, cascade)]
        lines.append(
            f"| {row['workload']} | {row['rows']} | {flat['device_us']:.0f} | {cascade['device_us']:.0f} | {host[0]} "
            f"| {host[1]} | {flat['tokens_per_s']} | {cascade['tokens_per_s']} "
            f"| {cascade['tokens_per_s'] / flat['tokens_per_s']:.2f}x |"
        )
    lines += [
        "",
        "### Host time of a decode step, microseconds",
        "",
        "| requests | context | levels | page ids | session | find the fit | load | replay, all of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in record["decode"]:
        us = row["host_us"]
        lines.append(
            f"| {row['requests']} | {row['context']} | {row['levels']} | {row['page_ids']} | {us['session']:.0f} "
            f"| {us['lay']:.0f} | {us['load']:.0f} | {us['replay']:.0f} |"
        )
    buckets = ", ".join(map(str, model["buckets"]))
    lines.append("")
    for key, captured in model["captured"].items():
        lines.append(
            f"- Capturing the {key} pool, buckets {buckets}: {captured['graphs']} graphs, {captured['seconds']} s, "
            f"{captured['megabytes']} MB."
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", help="measure, and write the record here")
    parser.add_argument("--attention", type=lambda s: s.split(","), default=ATTENTION)
    parser.add_argument("--model", type=lambda s: s.split(","), default=MODEL)
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no workload is begun")
    parser.add_argument("--commit", help="of the code that is measured; git's HEAD by default")
    arguments = parser.parse_args()
    if arguments.json:
        run(arguments)
    elif arguments.write or arguments.check:
        text = table(json.loads(RECORD.read_text()))
        put_table(DOCUMENT, "scripts/bench_graphs.py", text, write=arguments.write)
    else:
        print(table(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
