"""What docs/benchmarks.md shows of the committed records: tables, and plots in docs/images.

python scripts/bench_docs.py --write      write them
python scripts/bench_docs.py --check      fail when they show anything else

The records are docs/records/h200_executors*.json, which `flashinfer-cascade bench --json` writes.
"""

import argparse
import sys
from pathlib import Path

from flashinfer_cascade.bench.plots import file_name, plots
from flashinfer_cascade.bench.records import machine_line, put_table
from flashinfer_cascade.bench.results import read_record
from flashinfer_cascade.bench.tables import ceilings, section, title

ROOT = Path(__file__).resolve().parents[1]
RECORDS = sorted((ROOT / "docs" / "records").glob("h200_executors*.json"))
DOCUMENT, IMAGES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images"


def text_and_images():
    """The document's tables in Markdown, and its plots by name."""
    lines, images = [], {}
    for path in RECORDS:
        record = read_record(path)
        lines += [
            f"[`{path.name}`](records/{path.name}): {machine_line(record.model_dump())}; {ceilings(record)}.",
            "Microseconds a layer.",
            "",
        ]
        images |= plots(record)
        for rows in record.groups():
            lines += [f"### {title(rows)}", "", f"![{title(rows)}](images/{file_name(rows)})", "", *section(rows), ""]
        lines += [f"- {case}: left out ({reason})." for case, reason in record.left_out.items()]
        lines.append("")
    return "\n".join(lines).rstrip(), images


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text, images = text_and_images()
    put_table(DOCUMENT, "scripts/bench_docs.py", text, write=arguments.write)
    shown = {path.name: path for path in IMAGES.glob("bench-*.svg")}
    if arguments.write:
        IMAGES.mkdir(exist_ok=True)
        for name in shown.keys() - images.keys():
            shown[name].unlink()
        for name, content in images.items():
            (IMAGES / name).write_text(content, encoding="utf-8")
    elif {name: path.read_text(encoding="utf-8") for name, path in shown.items()} != images:
        sys.exit("docs/images is stale: run python scripts/bench_docs.py --write")


if __name__ == "__main__":
    main()
