"""A benchmark's record: pydantic models, files, and what rows say of one another."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flashinfer_cascade.bench.cases import FIRST_HEADS, Case, Suite
from flashinfer_cascade.errors import InvalidBatchError

SCHEMA: Final = 1
"""Grows whenever a record of before would be read wrongly."""

OURS = ("flat", "levels", "segments", "auto")
BASELINES = ("flat", "decode", "prefill_fa2", "prefill_fa3", "stock_default", "stock_fa2")
"""What a cascade is compared with: one launch over every request's whole context, as this package and as FlashInfer's
own wrappers run it, and FlashInfer's multi-level wrapper."""

LOST_BEYOND = 1.02
"""How many times slower a row may be before it counts as lost."""

_Us = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Model):
    """One candidate's time a layer, and how right its result was.

    Attributes:
        us: median of the repeats, microseconds.
        low_us, high_us: the fastest and the slowest repeat.
        max_error: largest relative L2 error over the checked rows and heads; None for a result with NaN.
    """

    us: _Us
    low_us: _Us
    high_us: _Us
    max_error: float | None

    @model_validator(mode="after")
    def _check(self) -> Measured:
        if not self.low_us <= self.us <= self.high_us:
            raise ValueError(f"us={self.us} lies outside its spread, {self.low_us} to {self.high_us}")
        return self


class Choice(_Model):
    """What one of our plans is, and what making it costs the host.

    Attributes:
        executor: of each part, joined by "+".
        reason: of each part, joined by "; ".
        num_levels: levels of the plan.
        backends: kernel of each level, part after part.
        predicted_us: time a layer by executor; where there are two parts, of those that both have.
        plan_us: one-shot planning on the host; None where it was not measured.
        load_us: `CascadeRuntime.load` on the host: lowering, copying, FlashInfer's own planning; likewise.
    """

    executor: str
    reason: str
    num_levels: _Count
    backends: tuple[str, ...]
    predicted_us: dict[str, float]
    plan_us: float | None
    load_us: float | None


class Row(_Model):
    """One case: the fields of `Case`, and what came of it.

    Attributes:
        suite, workload, num_qo_heads, num_kv_heads, page_size, kv_dtype: see `Case`.
        description: of the workload.
        num_requests, num_rows: of the workload.
        roof_us: see `roof.Roof`.
        repeats: interleaved turns, of which `results` have medians.
        checked_rows: rows that were held against the fp64 oracle; all of them, unless that would take too long.
        error_budget: what `Measured.max_error` may be.
        results: by candidate.
        refused: why the other candidates cannot run this.
        choices: by candidate, of ours.
    """

    suite: Suite
    workload: str
    num_qo_heads: _Count
    num_kv_heads: _Count
    page_size: _Count
    kv_dtype: str
    description: str
    num_requests: _Count
    num_rows: _Count
    roof_us: _Us
    repeats: _Count
    checked_rows: _Count
    error_budget: _Us
    results: dict[str, Measured]
    refused: dict[str, str]
    choices: dict[str, Choice]

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.suite, self.workload, self.num_qo_heads, self.num_kv_heads, self.page_size, self.kv_dtype)

    @property
    def label(self) -> str:
        """Name of the row among those of its `group`."""
        heads = (self.num_qo_heads, self.num_kv_heads)
        is_odd = self.suite == "irregular" and heads != FIRST_HEADS
        return f"{self.workload} ({heads[0]}/{heads[1]})" if is_odd else self.workload

    @property
    def group(self) -> tuple[str, int, int, int, str]:
        """Rows of one table: suite, heads, page size and dtype. Irregular workloads have heads of their own."""
        heads = FIRST_HEADS if self.suite == "irregular" else (self.num_qo_heads, self.num_kv_heads)
        return (self.suite, *heads, self.page_size, self.kv_dtype)

    def ratio(self, name: str) -> float | None:
        """A candidate's time over the roof; None where it was refused."""
        measured = self.results.get(name)
        return None if measured is None else measured.us / self.roof_us

    def best_baseline(self) -> str | None:
        """Fastest of `BASELINES`; None when all were refused."""
        names = [name for name in BASELINES if name in self.results]
        return min(names, key=lambda name: self.results[name].us, default=None)

    def speedup(self, name: str = "auto") -> float | None:
        """How many times faster a candidate is than the best baseline; None where either is missing."""
        best, measured = self.best_baseline(), self.results.get(name)
        return None if best is None or measured is None else self.results[best].us / measured.us

    def lost(self, name: str = "auto") -> bool:
        """Whether a candidate is slower than the best baseline by more than 2%, and outside both spreads."""
        best, measured = self.best_baseline(), self.results.get(name)
        if best is None or measured is None:
            return False
        other = self.results[best]
        return measured.us > LOST_BEYOND * other.us and measured.low_us > other.high_us

    def wrong(self) -> list[str]:
        """Candidates whose results exceed the error budget."""
        return [
            name
            for name, measured in self.results.items()
            if measured.max_error is None or measured.max_error > self.error_budget
        ]


class Ceilings(_Model):
    """What the GPU reached in the same run, beside the fixed ceilings of `roof`.

    Attributes:
        read_tb_per_s: streaming reads, 1e12 B/s.
        copy_tb_per_s: copies; bytes read and written.
        matmul_tflops: dense bf16 matmul, 1e12 FLOP/s.
    """

    read_tb_per_s: _Us
    copy_tb_per_s: _Us
    matmul_tflops: _Us


class Record(_Model):
    """One run of the benchmark, or several that continued one another.

    Attributes:
        schema_version: `SCHEMA`.
        hardware: gpu, num_sms and, in newer ones, capability.
        versions: of flashinfer, torch and cuda.
        commit: of the code that was measured.
        date: ISO, when the run began.
        ceilings: None where they were not measured.
        rows: in the order in which they were measured.
        left_out: why a case has no row.
    """

    schema_version: Literal[1]
    hardware: dict[str, str | int]
    versions: dict[str, str | None]
    commit: str
    date: str
    ceilings: Ceilings | None = None
    rows: list[Row] = []
    left_out: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _is_current(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("schema_version") != SCHEMA:
            raise ValueError(
                f"schema_version={data.get('schema_version')} must be {SCHEMA}: measure again with "
                "'flashinfer-cascade bench', or read it with the version that wrote it"
            )
        return data

    def groups(self) -> list[list[Row]]:
        """Rows of one table each, in the order of the record."""
        tables: dict[tuple[str, int, int, int, str], list[Row]] = {}
        for row in self.rows:
            tables.setdefault(row.group, []).append(row)
        return list(tables.values())


def read_record(path: Path) -> Record:
    """A record's file.

    Raises:
        OSError: it cannot be read.
        InvalidBatchError: it is no record, or a stale one.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        found = error.errors()[0]
        where = "".join(f"{part}: " for part in (".".join(map(str, found["loc"])),) if part)
        message = found["msg"].removeprefix("Value error, ")
        raise InvalidBatchError(f"{path.name} is no record of this version: {where}{message}") from error


def write_record(record: Record, path: Path) -> None:
    """Replace the file at once: whoever is killed meanwhile leaves the old one or the new one whole."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def geomean(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
