"""Committed measurements: what a record says of its machine, and the tables that documents show of it."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Of a checkout."""


def describe_machine(commit: str | None) -> dict[str, Any]:
    """Hardware, versions, commit and date: the head of a record.

    Args:
        commit: of the code that is measured; None asks git.
    """
    import flashinfer
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "hardware": {
            "gpu": properties.name,
            "num_sms": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        },
        "versions": {
            "flashinfer": flashinfer.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "commit": commit or _head(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _head() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or "unknown"


def machine_line(record: dict[str, Any]) -> str:
    """A record's head in one sentence."""
    versions = record["versions"]
    return (
        f"{record['hardware']['gpu']}, FlashInfer {versions['flashinfer']}, torch {versions['torch']}, "
        f"{record['date']}, commit {record['commit']}"
    )


def put_table(document: Path, script: str, table: str, *, write: bool) -> None:
    """Put a script's table between its marks in a document, or see that it stands there.

    Args:
        document: Markdown with one ``<!-- table: SCRIPT -->`` and an ``<!-- end of table -->`` behind it.
        script: as it is called from the root of a checkout.
        table: Markdown.
        write: else a difference ends the process with an error.
    """
    begin, end = f"<!-- table: {script} -->", "<!-- end of table -->"
    shown = document.read_text()
    head, rest = shown.split(begin)
    fresh = f"{head}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"
    if write:
        document.write_text(fresh)
    elif fresh != shown:
        sys.exit(f"{document.relative_to(ROOT)} is stale: run python {script} --write")
