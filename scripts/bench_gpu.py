"""Times of the executors beside stock FlashInfer, on a GPU, and the document that shows them.

python scripts/bench_gpu.py --json PATH [--heads 32/8,64/8] [--workloads P1,P2] [--deadline SECONDS]
python scripts/bench_gpu.py --write      put the table of the committed record into docs/benchmarks.md
python scripts/bench_gpu.py --check      fail when docs/benchmarks.md shows another one

Every time is microseconds a layer: CUDA-graph replay over rotating KV caches, calls of one workload turn and turn
about, the median of five repeats with their lowest and highest.
"""

import argparse
import json
import math
import time
from pathlib import Path

from flashinfer_cascade import CascadePlanner, CascadeRuntime, PlannerPolicy
from flashinfer_cascade.bench.records import describe_machine, machine_line, put_table
from flashinfer_cascade.bench.workloads import grid

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "records" / "h200_executors.json"
DOCUMENT = ROOT / "docs" / "benchmarks.md"

HBM_TB_PER_S, TENSOR_TFLOPS = 4.47, 790.0
"""Ceilings that `roof` divides by, the same in every record: reading HBM and dense bf16 matmul on an H200."""

COUNTED = [f"P{i}" for i in (*range(1, 13), 14, 16, 17, 18)]
"""Trees of the geometric means."""

WORKLOADS = [f"P{i}" for i in range(1, 21)] + [f"S{i}" for i in range(1, 6)]


def measure_workload(work, heads, pool, with_default):
    import flashinfer
    import torch

    from flashinfer_cascade.bench.timing import measure
    from flashinfer_cascade.testing import dense_attention, error_budget, plain_attention, relative_errors

    config = work.config(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    caches = pool.caches(config, work.num_pages)
    q = torch.randn(work.num_rows, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    outs, calls, plans = {}, {}, {}

    def add(name, policy):
        plan = CascadePlanner(config, policy).plan(work.block_tables, work.seq_lens, work.qo_lens)
        runtime = CascadeRuntime(config)
        runtime.load(plan)
        outs[name], plans[name] = torch.full_like(q, math.nan), plan
        calls[name] = lambda cache: runtime.run(q, cache, out=outs[name])

    add("auto", PlannerPolicy())
    add("flat", PlannerPolicy(executor="flat"))
    add("levels", PlannerPolicy(executor="levels"))
    every_node = CascadePlanner(config, PlannerPolicy(executor="levels", fold=False)).plan(
        work.block_tables, work.seq_lens, work.qo_lens
    )
    workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    stock = {"stock_fa2": "fa2"} | ({"stock_default": None} if with_default else {})
    for name, backend in stock.items():
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(every_node.num_levels, workspace, config.kv_layout)
        for level in wrapper._batch_prefill_wrappers if backend else ():
            level._backend = backend
        wrapper.plan(**every_node.to_flashinfer())
        calls[name] = lambda cache, name=name, wrapper=wrapper: outs.__setitem__(name, wrapper.run(q, cache))
    times = measure(calls, caches)

    # Every result against fp64, for some requests.
    chosen = sorted({i * (work.num_requests - 1) // 7 for i in range(8)})
    step = ([work.block_tables[r].tolist() for r in chosen], [int(work.seq_lens[r]) for r in chosen], [1] * len(chosen))
    oracle, _ = dense_attention(config, q[chosen], caches[0], *step)
    plain = plain_attention(config, q[chosen], caches[0], *step)
    for call in calls.values():
        call(caches[0])
    torch.cuda.synchronize()
    errors = {name: float(relative_errors(out[chosen], oracle).amax()) for name, out in outs.items()}
    forest = every_node.parts[0].forest
    pages = int(forest.num_pages.sum()) + int((-(-every_node.seg_kv_len[-work.num_requests :] // 16)).sum())
    kv_us = (pages * 16 * config.kv_token_bytes + 2 * q.numel() * 2) / HBM_TB_PER_S / 1e6
    flop_us = 4 * int(work.seq_lens.sum()) * heads[0] * 128 / TENSOR_TFLOPS / 1e6
    auto, levels = plans["auto"].parts[0], plans["levels"].parts[0]
    return {
        "workload": work.name,
        "description": work.description,
        "heads": list(heads),
        "roof_us": round(max(kv_us, flop_us), 2),
        "us": {name: [round(t.us, 2), *(round(x, 2) for x in t.spread_us)] for name, t in times.items()},
        "chosen": auto.executor,
        "levels": {"num_levels": levels.num_levels, "backends": levels.backends},
        "predicted_us": {name: round(us, 2) for name, us in levels.predicted_us.items()},
        "max_error": {name: round(error, 5) for name, error in errors.items()},
        "error_budget": round(error_budget(oracle, plain), 5),
    }


def run(arguments):
    import torch

    from flashinfer_cascade.bench.timing import KvPool

    started = time.monotonic()
    record = {
        "what": "us a layer: [median, lowest, highest] of five interleaved repeats; bf16, head_dim 128, page_size 16. "
        "auto is the planner's choice; stock is MultiLevelCascadeAttentionWrapper with every shared node a group, on "
        "fa2 or on the backend it chooses itself (default)",
        **describe_machine(arguments.commit),
        "results": [],
    }
    pool = KvPool(arguments.pool_gb * 10**9, torch.bfloat16, torch.device("cuda"))
    works = {work.name: work for work in grid(arguments.workloads)}
    for heads in arguments.heads:
        for name, work in works.items():
            if time.monotonic() - started > arguments.deadline:
                print("deadline reached", flush=True)
                break
            try:
                row = measure_workload(work, heads, pool, with_default=heads == (32, 8))
            except MemoryError as error:
                print(name, heads, "left out:", error, flush=True)
                continue
            record["results"].append(row)
            us = " ".join(f"{key} {value[0]:.1f}" for key, value in row["us"].items())
            print(f"{name} {heads[0]}/{heads[1]}: roof {row['roof_us']:.1f} {us} -> {row['chosen']}", flush=True)
            Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def table(record):
    lines = []
    for heads in sorted({tuple(row["heads"]) for row in record["results"]}, key=lambda h: (h != (32, 8), h)):
        rows = [row for row in record["results"] if tuple(row["heads"]) == heads]
        lines += [f"### {heads[0]} query heads, {heads[1]} KV heads", ""]
        lines.append(
            "| workload | roof | flat | stock default | stock fa2 | levels | chosen | us | vs best stock way |"
        )
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for row in rows:
            us = {name: value[0] for name, value in row["us"].items()}
            default = f"{us['stock_default']:.1f}" if "stock_default" in us else "-"
            best = min(us["flat"], us["stock_fa2"], us.get("stock_default", math.inf))
            lines.append(
                f"| {row['workload']} | {row['roof_us']:.1f} | {us['flat']:.1f} | {default} | {us['stock_fa2']:.1f} "
                f"| {us['levels']:.1f} | {row['chosen']} | {us['auto']:.1f} | {best / us['auto']:.2f}x |"
            )
        counted = [row for row in rows if row["workload"] in COUNTED]
        if counted:
            over = {
                "flat": geomean([r["us"]["flat"][0] / r["us"]["auto"][0] for r in counted]),
                "the stock wrapper on fa2": geomean([r["us"]["stock_fa2"][0] / r["us"]["auto"][0] for r in counted]),
                "the better of both": geomean(
                    [min(r["us"]["flat"][0], r["us"]["stock_fa2"][0]) / r["us"]["auto"][0] for r in counted]
                ),
            }
            said = ", ".join(f"{value:.2f}x as fast as {name}" for name, value in over.items())
            roof = geomean([r["us"]["auto"][0] / r["roof_us"] for r in counted])
            lines += ["", f"Geometric mean over {len(counted)} trees (P1-P12, P14, P16-P18): {said}; {roof:.2f}x roof."]
        lines.append("")
    return "\n".join(lines).rstrip()


def losses(record, factor):
    """Rows where the choice is slower than flat by more than `factor`, beyond the spread of the repeats."""
    for row in record["results"]:
        (auto, low, _), (flat, _, flat_high) = row["us"]["auto"], row["us"]["flat"]
        if auto > factor * flat and low > flat_high:
            yield row


def show(arguments):
    record = json.loads(RECORD.read_text())
    text = f"{machine_line(record)}; microseconds a layer.\n\n{table(record)}"
    put_table(DOCUMENT, "scripts/bench_gpu.py", text, write=arguments.write)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", help="measure, and write the record here")
    parser.add_argument(
        "--heads", type=lambda s: [tuple(map(int, h.split("/"))) for h in s.split(",")], default=[(32, 8)]
    )
    parser.add_argument("--workloads", type=lambda s: s.split(","), default=WORKLOADS)
    parser.add_argument("--pool-gb", type=int, default=32, help="GPU memory for KV caches")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no workload is begun")
    parser.add_argument("--commit", help="of the code that is measured; git's HEAD by default")
    arguments = parser.parse_args()
    if arguments.json:
        run(arguments)
    elif arguments.write or arguments.check:
        show(arguments)
    else:
        print(table(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
