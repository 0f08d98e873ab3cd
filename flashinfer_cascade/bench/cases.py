"""What a benchmark measures: suites of cases, each a workload with heads, a page size and a dtype of its KV."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from flashinfer_cascade.bench.workloads import APPENDS, IRREGULAR, TREES, Workload, grid, read_grid
from flashinfer_cascade.config import KV_DTYPES, CascadeConfig
from flashinfer_cascade.errors import InvalidBatchError

Suite = Literal["decode", "heads", "append", "fp8", "irregular"]
Heads = tuple[int, int]

SUITES: dict[Suite, tuple[str, ...]] = {
    "decode": TREES,
    "heads": TREES,
    "append": APPENDS,
    "fp8": TREES,
    "irregular": IRREGULAR,
}
"""Workloads of each suite."""

QUICK = ("P1", "P3", "P10", "P19", "S1", "S4", "A1", "A4", "A9", "tool", "chat")
"""Some of each suite, for a first look."""

COUNTED = tuple(f"P{i}" for i in (*range(1, 13), 14, 16, 17, 18))
"""Trees of the geometric means."""

FIRST_HEADS: Heads = (32, 8)
BEAM_HEADS: Heads = (16, 8)
"""Of the workload "beam". Source: data/grid.json."""


class Case(NamedTuple):
    """One row of a record.

    Attributes:
        suite: where it is shown.
        workload: name in the grid.
        num_qo_heads, num_kv_heads: on one rank.
        page_size: tokens a KV page holds.
        kv_dtype: of the KV cache; q is bfloat16.
    """

    suite: Suite
    workload: str
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    kv_dtype: str

    def __str__(self) -> str:
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"{self.workload}, {heads} heads, page {self.page_size}, {self.kv_dtype}"

    def build(self) -> tuple[Workload, CascadeConfig]:
        """The batch, and a configuration that it just fits.

        Raises:
            InvalidBatchError: an unknown workload, or a page size below 1.
            pydantic.ValidationError: heads or dtypes contradict each other.
        """
        (work,) = grid([self.workload], self.page_size)
        return work, work.config(self.num_qo_heads, self.num_kv_heads, kv_dtype=self.kv_dtype)


def suites(names: Sequence[str]) -> list[Suite]:
    """Suites by name; "all" is every one.

    Raises:
        InvalidBatchError: an unknown name, or none.
    """
    for name in names or [""]:
        if name not in (*SUITES, "all"):
            raise InvalidBatchError(f"no suite {name!r}: choose from {', '.join(SUITES)} or all")
    return [suite for suite in SUITES if suite in names or "all" in names]


def select(
    suites: Sequence[Suite],
    workloads: Sequence[str] | None = None,
    heads: Sequence[Heads] | None = None,
    page_sizes: Sequence[int] | None = None,
    kv_dtypes: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Case]:
    """Cases of some suites, none twice.

    Args:
        suites: which.
        workloads: those of them alone.
        heads: rather than the suite's.
        page_sizes: likewise.
        kv_dtypes: likewise.
        quick: a few workloads (`QUICK`), unless some are named.

    Raises:
        InvalidBatchError: no suite has such a workload, or there is no such dtype.
    """
    known = [name for suite in suites for name in SUITES[suite]]
    for name in workloads or ():
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise InvalidBatchError(f"no workload {name!r} in {' or '.join(suites)}: choose from {listed}")
    for name in kv_dtypes or ():
        if name not in KV_DTYPES:
            raise InvalidBatchError(f"kv_dtype {name!r}: choose from {', '.join(KV_DTYPES)}")
    wanted = (QUICK if quick else known) if workloads is None else workloads
    cases: dict[tuple[object, ...], Case] = {}
    for suite in suites:
        pages = page_sizes or ((16, 1) if suite == "irregular" else (16,))
        dtypes = kv_dtypes or (("float8_e4m3fn",) if suite == "fp8" else ("bfloat16",))
        names = [name for name in SUITES[suite] if name in wanted]
        for page_size, kv_dtype, pair, name in product(pages, dtypes, heads or _heads(suite), names):
            own = BEAM_HEADS if name == "beam" and not heads else pair
            case = Case(suite, name, *own, page_size, kv_dtype)
            cases.setdefault(case[1:], case)
    return list(cases.values())


def _heads(suite: Suite) -> list[Heads]:
    if suite != "heads":
        return [FIRST_HEADS]
    listed = [(heads["num_qo_heads"], heads["num_kv_heads"]) for heads in read_grid()["heads"]]
    return [heads for heads in listed if heads != FIRST_HEADS]
