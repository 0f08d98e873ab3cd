"""Predicted against measured times, from a committed record of stock FlashInfer.

python scripts/cost_report.py            print the table
python scripts/cost_report.py --write    put it into docs/cost_model.md
python scripts/cost_report.py --check    fail when docs/cost_model.md holds another one
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

from flashinfer_cascade import CascadeConfig
from flashinfer_cascade.bench.stock import predict_stock
from flashinfer_cascade.bench.workloads import tree
from flashinfer_cascade.cost import CostModel, Launch
from flashinfer_cascade.profile import PROFILES

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "records" / "h200_stock_flashinfer.json"
DOCUMENT = ROOT / "docs" / "cost_model.md"
BEGIN, END = "<!-- table: scripts/cost_report.py -->", "<!-- end of table -->"


def config(heads):
    return CascadeConfig(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        page_size=16,
        dtype="bfloat16",
        max_batch_size=4096,
        max_num_rows=2**16,
        max_kv_pages=2**24,
        max_kv_indices=2**26,
    )


def predict_tree(spec, heads):
    return predict_stock(config(heads), PROFILES["h200"], tree(spec))


def predict_launch(row):
    model = CostModel(config(row["heads"]), PROFILES["h200"])
    groups = row["groups"]
    launch = Launch(np.full(groups, row["rows"]), np.full(groups, row["tokens"]), groups * row["tokens"])
    return model.fa3_us(launch) if row["kind"] == "fa3" else model.fa2_us(launch)


def ratios(rows):
    """(row, predicted / measured) of every row of a record."""
    trees = {}
    out = []
    for row in rows:
        if row["kind"] in ("launch", "fa3"):
            predicted = predict_launch(row)
        else:
            key = (row["tree"], tuple(row["heads"]))
            if key not in trees:
                trees[key] = predict_tree(*key)
            predicted = trees[key][row["kind"]]
        out.append((row, predicted / row["us"]))
    return out


def within(values, factor):
    """Share of ratios within a factor of 1."""
    return sum(abs(math.log(value)) <= math.log(factor) for value in values) / len(values)


def table(rated):
    lines = [
        "| what | heads | cases | within 1.15x | within 1.4x | lowest | highest |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {
        "flat": "flat decode",
        "levels": "multi-level wrapper",
        "launch": "one fa2 launch",
        "fa3": "one fa3 launch",
    }
    for kind, name in names.items():
        for heads in ([32, 8], [32, 32], [64, 8], [16, 1]):
            values = [ratio for row, ratio in rated if row["kind"] == kind and row["heads"] == heads]
            if values:
                lines.append(
                    f"| {name} | {heads[0]}/{heads[1]} | {len(values)} | {within(values, 1.15):.0%} "
                    f"| {within(values, 1.4):.0%} | {min(values):.2f} | {max(values):.2f} |"
                )
    lines += ["", "32 query and 8 KV heads, tree by tree (predicted / measured, us):", ""]
    lines += ["| tree | | flat | | levels | |", "|---|---|---|---|---|---|"]
    by_name = {}
    for row, ratio in rated:
        if row["kind"] in ("flat", "levels") and row["heads"] == [32, 8] and row["name"][0] in "PS":
            by_name.setdefault((row["name"], row["tree"]), {})[row["kind"]] = (row["us"], ratio)
    for (name, spec), kinds in by_name.items():
        cells = [f"{us * ratio:.1f} / {us:.1f} | {ratio:.2f}" for us, ratio in (kinds["flat"], kinds["levels"])]
        lines.append(f"| {name} | {spec} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = table(ratios(json.loads(RECORD.read_text())["results"]))
    if not (arguments.write or arguments.check):
        print(text)
        return
    document = DOCUMENT.read_text()
    head, rest = document.split(BEGIN)
    fresh = f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"
    if arguments.write:
        DOCUMENT.write_text(fresh)
    elif fresh != document:
        sys.exit(f"{DOCUMENT.relative_to(ROOT)} is stale: run python scripts/cost_report.py --write")


if __name__ == "__main__":
    main()
