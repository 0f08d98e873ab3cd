"""Batches of block tables: synthetic prefix trees, appends, and the named workloads of the benchmarks.

A workload is described by what each request's sequence consists of: a path of spans ``(key, tokens)``, where
equal keys under equal paths mean equal tokens. `workload` turns that into pages as an engine's prefix cache
would: a page is shared exactly when it is full and all its tokens are.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array
from flashinfer_cascade.errors import InvalidBatchError

DATA = Path(__file__).resolve().parents[1] / "data"
TREES = tuple(f"P{i}" for i in range(1, 21)) + tuple(f"S{i}" for i in range(1, 7))
APPENDS = tuple(f"A{i}" for i in range(1, 10))
IRREGULAR = ("half", "tool", "sample8", "beam", "chat")

Spans = Sequence[tuple[Hashable, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One step's input to a planner, with a name.

    Attributes:
        name: short and unique among those it is compared with.
        block_tables: int32[num_requests, max_pages], page ids, padded with -1.
        seq_lens: int64[num_requests], KV tokens, this step's new ones included.
        qo_lens: int64[num_requests], query rows; None is one each (decode).
        page_size: tokens a page holds.
        description: where it comes from, in one line.
    """

    name: str
    block_tables: Int32Array
    seq_lens: Int64Array
    qo_lens: Int64Array | None
    page_size: int
    description: str

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """Query tokens in the batch."""
        return self.num_requests if self.qo_lens is None else int(self.qo_lens.sum())

    @property
    def num_pages(self) -> int:
        """Pages of a KV cache that holds the batch: above every page id."""
        return int(self.block_tables.max()) + 1

    def config(
        self,
        num_qo_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        dtype: str = "bfloat16",
        **others: Any,
    ) -> CascadeConfig:
        """A configuration of this page size whose limits the batch just fits.

        Raises:
            pydantic.ValidationError: the values contradict each other.
        """
        return CascadeConfig(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            page_size=self.page_size,
            max_batch_size=self.num_requests,
            max_num_rows=self.num_rows,
            max_kv_pages=self.num_pages,
            max_kv_indices=int((-(-self.seq_lens // self.page_size)).sum()),
            **others,
        )

    def shuffled(self, seed: int = 0) -> Workload:
        """The same requests in a random order."""
        order = np.random.default_rng(seed).permutation(self.num_requests)
        return replace(
            self,
            block_tables=self.block_tables[order],
            seq_lens=self.seq_lens[order],
            qo_lens=None if self.qo_lens is None else self.qo_lens[order],
        )


def workload(
    name: str,
    paths: Iterable[Spans],
    page_size: int,
    *,
    description: str,
    qo_lens: Sequence[int] | None = None,
    seed: int | None = None,
) -> Workload:
    """Lay out sequences in pages.

    Args:
        name: of the result.
        paths: each request's sequence, a series of ``(key, tokens)``. A key stands for its tokens and for all
            that precedes them, so it has one length and one path above it in all requests.
        page_size: tokens a page holds.
        description: of the result.
        qo_lens: query rows of each request; None is decode.
        seed: shuffles the page ids; None numbers pages as they are first met.

    Raises:
        InvalidBatchError: no requests, or page_size below 1.
    """
    if page_size < 1:
        raise InvalidBatchError(f"page_size={page_size} must be at least 1")
    # A page belongs to the span that holds its last token; the key of that span says what came before.
    pages: dict[Hashable, range] = {}
    num_pages = 0
    tables, seq_lens = [], []
    for path in paths:
        table: list[int] = []
        end = 0
        for key, tokens in path:
            end += tokens
            full = end // page_size - len(table)
            if key not in pages:
                pages[key] = range(num_pages, num_pages + full)
                num_pages += full
            table.extend(pages[key])
        if end % page_size:
            table.append(num_pages)
            num_pages += 1
        tables.append(table)
        seq_lens.append(end)
    if not tables:
        raise InvalidBatchError(f"{name} has no requests")
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    if seed is not None:
        # The last entry stays -1, for the padding.
        ids = np.append(np.random.default_rng(seed).permutation(num_pages), -1).astype(np.int32)
        padded = ids[padded]
    rows = None if qo_lens is None else np.array(qo_lens, np.int64)
    return Workload(name, padded, np.array(seq_lens, np.int64), rows, page_size, description)


def tree(spec: str, page_size: int = 16, seed: int = 0, name: str = "") -> Workload:
    """A decode batch over a prefix tree: one request a leaf.

    Args:
        spec: nodes per level, then tokens per node: ``"1,4,16,512_1024,256,128,32"``. Children are spread
            evenly over the level above. Where a level ends inside a page, that page belongs to what is below.
        page_size: tokens a page holds.
        seed: shuffles the page ids.
        name: of the result; the spec by default.

    Raises:
        InvalidBatchError: the spec does not parse, or has a level smaller than the one above.
    """
    try:
        counts, lengths = ([int(number) for number in half.split(",")] for half in spec.split("_"))
    except ValueError as error:
        raise InvalidBatchError(
            f"tree {spec!r} is not 'nodes per level _ tokens per node', such as '1,4,64_1024,256,32'"
        ) from error
    if len(counts) != len(lengths) or min(counts + lengths) < 1 or counts != sorted(counts):
        raise InvalidBatchError(
            f"tree {spec!r}: give as many lengths as levels, all at least 1, and no level with fewer nodes "
            "than the one above"
        )
    paths = []
    for leaf in range(counts[-1]):
        nodes = [leaf]
        for above, below in zip(counts[-2::-1], counts[:0:-1], strict=True):
            nodes.append(nodes[-1] * above // below)
        paths.append([((level, node), lengths[level]) for level, node in enumerate(reversed(nodes))])
    return workload(name or spec, paths, page_size, seed=seed, description=f"prefix tree {spec}")


def append(requests: int, shared: int, own: int, new: int, page_size: int = 16, seed: int = 0) -> Workload:
    """Requests that append ``new`` tokens each, behind a shared prefix and some context of their own."""
    paths = [[("shared", shared), (r, own + new)] for r in range(requests)]
    return workload(
        f"append-{requests}-{shared}-{own}-{new}",
        paths,
        page_size,
        qo_lens=[new] * requests,
        seed=seed,
        description=f"{requests} requests under {shared} tokens, {own} of their own, {new} new",
    )


def grid(names: Iterable[str] = TREES, page_size: int = 16, seed: int = 0) -> list[Workload]:
    """Workloads of the benchmark grid by name: `TREES` (P1-P20, S1-S6), `APPENDS` (A1-A9) and `IRREGULAR`.

    Raises:
        InvalidBatchError: an unknown name.
    """
    listed = read_grid()
    out = []
    for name in names:
        if name in listed["trees"]:
            out.append(tree(listed["trees"][name], page_size, seed, name))
        elif name in listed["append"]:
            requests, shared, own, new = map(int, listed["append"][name].split(","))
            out.append(replace(append(requests, shared, own, new, page_size, seed), name=name))
        else:
            out.append(irregular(name, page_size, seed))
    return out


def read_grid() -> dict[str, Any]:
    """The grid's file: trees, appends, head counts, and descriptions of the irregular workloads."""
    listed: dict[str, Any] = json.loads((DATA / "grid.json").read_text(encoding="utf-8"))
    return listed


def irregular(name: str, page_size: int = 16, seed: int = 0) -> Workload:
    """One of the `IRREGULAR` workloads; ``seed`` draws its random lengths and shuffles its page ids.

    Raises:
        InvalidBatchError: an unknown name.
    """
    if name not in IRREGULAR:
        raise InvalidBatchError(f"no workload {name!r}: choose from {', '.join(TREES + APPENDS + IRREGULAR)}")
    rng = np.random.default_rng(seed)

    def uniform(low: int, high: int, count: int) -> list[int]:
        drawn: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
        return drawn

    paths: list[Spans]
    if name == "half":
        paths = [[("root", 4096), (r, 256)] if r < 32 else [(r, 2048)] for r in range(64)]
    elif name == "tool":
        own = uniform(300, 1200, 64)
        paths = [[("long", 6144) if r < 42 else ("short", 2560), (r, own[r])] for r in range(64)]
    elif name == "sample8":
        prompts, own = uniform(1024, 12288, 8), uniform(1, 512, 64)
        paths = [[(f"prompt{r // 8}", prompts[r // 8]), (r, own[r])] for r in range(64)]
    elif name == "beam":
        paths = [[("prompt", 2048), (r, 3)] for r in range(128)]
    else:
        paths = [[("system", 512), (r, own)] for r, own in enumerate(uniform(2048, 20480, 64))]
    return workload(name, paths, page_size, seed=seed, description=read_grid()["irregular"][name])
