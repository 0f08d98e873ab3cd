"""Block tables in any engine's form, validated once into one compact batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashinfer_cascade.config import MAX_INT32, CascadeConfig
from flashinfer_cascade.csr import Int32Array, Int64Array, indptr, ranges
from flashinfer_cascade.errors import CapacityError, InvalidBatchError, told
from flashinfer_cascade.pages import INDEX_SLACK, PageView

SPARSE_TABLE = 4
"""A padded table with this many times more entries than page ids is read row by row."""


class CsrTables(NamedTuple):
    """Block tables in CSR form: request r's pages are ``kv_indices[kv_indptr[r]:kv_indptr[r + 1]]``.

    Attributes:
        kv_indptr: int[num_requests + 1], CPU, in pages, starts at 0, non-decreasing.
        kv_indices: int[>= kv_indptr[-1]], CPU, page ids; what lies behind kv_indptr[-1] is ignored.
    """

    kv_indptr: Any
    kv_indices: Any


@dataclass(frozen=True, slots=True)
class Batch:
    """A validated batch: every table bounded by its ``seq_len``, all ids in range.

    Attributes:
        page_size: tokens a page holds.
        pages: where the page ids lie. Those of a one-shot batch lie one table after the other, and the slack behind
            them holds -1.
        page_begin: int64[num_requests], where each table begins in `pages.ids`.
        page_counts: int64[num_requests], pages that each request's `seq_len` needs.
        seq_lens: int64[num_requests], KV tokens with this step's new ones; 0 marks a padding request.
        qo_lens: int64[num_requests], query rows of this step, at least 1.
        block: int64[4, num_requests], of which these four are the rows.
        address: where that lies, for C.
    """

    page_size: int
    pages: PageView
    page_begin: Int64Array
    page_counts: Int64Array
    seq_lens: Int64Array
    qo_lens: Int64Array
    block: Int64Array
    address: int

    @classmethod
    def of(cls, page_size: int, pages: PageView, block: Int64Array, address: int | None = None) -> Batch:
        """The batch in a block, which is never written to again."""
        if address is None:
            address = block.ctypes.data
        page_begin, page_counts, seq_lens, qo_lens = block
        return cls(page_size, pages, page_begin, page_counts, seq_lens, qo_lens, block, address)

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch.of, (self.page_size, self.pages, self.block)

    @property
    def num_requests(self) -> int:
        """Requests in the batch, padding included."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """Query tokens in the batch."""
        return int(self.qo_lens.sum())

    @property
    def num_pages(self) -> int:
        """Page ids over all tables; shared pages count once per request."""
        return int(self.page_counts.sum())

    def shareable_pages(self) -> Int64Array:
        """Leading pages that other requests may share with each request: int64[num_requests].

        A page is shared only when it was full before this step, so that no row can see a token at or behind
        its own position through it: ``floor((seq_len - qo_len) / page_size)``.
        """
        computed: Int64Array = np.maximum(self.seq_lens - self.qo_lens, 0)
        return computed // self.page_size


def make_batch(config: CascadeConfig, block_tables: Any, seq_lens: Any, qo_lens: Any = None) -> Batch:
    """Validate one step's input and bring it into CSR form.

    Args:
        config: limits and page size.
        block_tables: one table per request: a sequence of sequences of ints, a 2-D integer array or CPU tensor
            (rows padded with anything), or `CsrTables`. Tables may be longer than their request.
        seq_lens: int[num_requests], KV tokens with this step's new ones. 0 marks a padding request: its rows
            attend nothing.
        qo_lens: int[num_requests], query rows of this step; None is one row each (decode).

    Raises:
        InvalidBatchError: wrong type, shape or value; names the request and the position.
        CapacityError: more requests, rows or page ids than the configuration reserves.
    """
    lens = int_vector("seq_lens", seq_lens)
    num_requests = len(lens)
    if num_requests == 0:
        raise InvalidBatchError("the batch is empty: skip the step when no request is live")
    if num_requests > config.max_batch_size:
        raise CapacityError(
            f"{num_requests} requests exceed max_batch_size={config.max_batch_size}: "
            "raise it in CascadeConfig or split the batch"
        )
    _check_range("seq_lens", lens, 0, MAX_INT32, "give the KV tokens of each request, new ones included")
    rows = query_lens(config, lens, qo_lens)
    counts = -(-lens // config.page_size)
    kv_indptr = indptr(counts)
    total = int(kv_indptr[-1])
    check_num_indices(config, total)
    kv_indices = np.empty(total + INDEX_SLACK, np.int32)
    kv_indices[total:] = -1
    _fill_indices(kv_indices[:total], block_tables, kv_indptr, counts, lens, config)
    kv_indices.flags.writeable = False  # plans hold views of it
    block = np.array((kv_indptr[:-1], counts, lens, rows))
    return Batch.of(config.page_size, PageView(kv_indices, total), block)


def check_num_indices(config: CascadeConfig, total: int) -> None:
    """Refuse more page ids than a batch may have.

    Raises:
        CapacityError: there are more.
    """
    if total > config.max_kv_indices:
        raise CapacityError(
            f"the block tables hold {total} page ids, above max_kv_indices={config.max_kv_indices}: "
            "raise it in CascadeConfig or split the batch"
        )


def check_num_rows(config: CascadeConfig, total: int) -> None:
    """Refuse more query rows than a batch may have.

    Raises:
        CapacityError: there are more.
    """
    if total > config.max_num_rows:
        raise CapacityError(
            f"{total} query rows exceed max_num_rows={config.max_num_rows}: "
            "raise it in CascadeConfig or split the batch"
        )


def query_lens(config: CascadeConfig, lens: Int64Array, qo_lens: Any) -> Int64Array:
    """Validate the query rows of each request: int64[num_requests]; None is one each.

    Raises:
        InvalidBatchError: wrong type, shape or value.
        CapacityError: more rows than a batch may have.
    """
    if qo_lens is None:
        rows = np.ones(len(lens), np.int64)
    else:
        rows = int_vector("qo_lens", qo_lens)
        if len(rows) != len(lens):
            raise InvalidBatchError(f"qo_lens has {len(rows)} entries for {len(lens)} seq_lens: give one per request")
        _check_range("qo_lens", rows, 1, MAX_INT32, "leave requests without a row out of the batch")
        bad = np.flatnonzero((rows > lens) & (lens > 0))
        if len(bad):
            r = int(bad[0])
            raise InvalidBatchError(
                f"qo_lens[{r}] = {rows[r]} exceeds seq_lens[{r}] = {lens[r]}: seq_lens counts the step's new tokens too"
            )
    check_num_rows(config, int(rows.sum()))
    return rows


def int_vector(name: str, values: Any) -> Int64Array:
    """A copy of a vector of integers in any container.

    Raises:
        InvalidBatchError: it is not one.
    """
    out = _integer_array(name, values)
    if out.ndim != 1:
        raise InvalidBatchError(f"{name} has shape {out.shape}: give one integer per request")
    return out.astype(np.int64)  # always a copy: the caller may overwrite its own buffer


def id_vector(name: str, values: Any, max_kv_pages: int) -> NDArray[Any]:
    """Page ids in any container, all in range.

    Raises:
        InvalidBatchError: they are not.
    """
    plain = type(values) is np.ndarray and values.dtype.kind == "i"
    out = values if plain else _integer_array(name, values)
    if out.ndim != 1:
        raise InvalidBatchError(f"{name} has shape {out.shape}: give one page id per entry")
    if out.itemsize < 4 or not out.dtype.isnative:
        out = out.astype(np.int64)
    # As unsigned numbers of at least 32 bits, negative ones are too large: one pass instead of two.
    if len(out) and out.view(f"u{out.itemsize}").max() >= max_kv_pages:
        at = int(np.flatnonzero((out < 0) | (out >= max_kv_pages))[0])
        raise InvalidBatchError(
            f"{name}: page id {out[at]} at position {at} is outside [0, max_kv_pages={max_kv_pages})"
        )
    return out


def _check_range(name: str, values: Int64Array, low: int, high: int, remedy: str) -> None:
    if values.min() < low or values.max() > high:
        r = int(np.flatnonzero((values < low) | (values > high))[0])
        raise InvalidBatchError(f"{name}[{r}] = {values[r]} is outside [{low}, {high}]: {remedy}")


def _integer_array(name: str, values: Any) -> NDArray[Any]:
    """A numpy view or copy of integers in any container; refuses floats, bools, masks and GPU tensors."""
    _refuse_gpu(name, values)
    if values is None or isinstance(values, (str, bytes, dict, set, frozenset, np.ma.MaskedArray)):
        raise InvalidBatchError(f"{told(name, values)}: give a sequence or an array of integers")
    if isinstance(values, Sequence) and any(isinstance(value, (bool, np.bool_)) for value in values):
        raise InvalidBatchError(f"{name} holds bool values: give int32 or int64")
    try:
        out = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InvalidBatchError(f"{name} is not an array of integers ({error})") from error
    if not out.size:
        return out.astype(np.int64)  # an empty list or array has no type that says anything
    if out.dtype.kind not in "iu":
        raise InvalidBatchError(f"{name} holds {out.dtype} values: give int32 or int64")
    if out.dtype == np.uint64:
        if out.max() > np.iinfo(np.int64).max:
            raise InvalidBatchError(f"{name} holds {out.max()}, above the int64 range")
        return out.astype(np.int64)
    return out


def _refuse_gpu(name: str, values: Any) -> None:
    device = getattr(getattr(values, "device", None), "type", "cpu")
    if device != "cpu":
        raise InvalidBatchError(
            f"{name} lies on {values.device}: planning reads it on the CPU, and copying it here would wait for "
            "the GPU. Pass the engine's CPU copy"
        )


def _fill_indices(
    out: Int32Array,
    tables: Any,
    kv_indptr: Int64Array,
    counts: Int64Array,
    lens: Int64Array,
    config: CascadeConfig,
) -> None:
    _refuse_gpu("block_tables", tables)
    if isinstance(tables, CsrTables):
        ids = _from_csr(tables, counts, lens, config)
    elif getattr(tables, "ndim", None) == 2:
        ids = _from_padded(_integer_array("block_tables", tables), counts, lens, config)
    elif not _is_indexable(tables):
        raise InvalidBatchError(f"{told('block_tables', tables)}: give a list of tables, a 2-D array or CsrTables")
    else:
        ids = _from_ragged(tables, counts, lens, config)
    if len(ids) and (ids.min() < 0 or ids.max() >= config.max_kv_pages):
        at = int(np.flatnonzero((ids < 0) | (ids >= config.max_kv_pages))[0])
        r = int(np.searchsorted(kv_indptr, at, side="right")) - 1
        raise InvalidBatchError(
            f"request {r}: page id {ids[at]} at position {at - kv_indptr[r]} is outside "
            f"[0, max_kv_pages={config.max_kv_pages}); its seq_len of {lens[r]} needs {counts[r]} valid pages"
        )
    out[:] = ids


def _is_indexable(value: Any) -> bool:
    """Whether it has a length and can be sliced, as lists, tuples, arrays and tensors can."""
    if isinstance(value, (str, bytes, dict, set, frozenset, np.ma.MaskedArray)):
        return False
    try:
        len(value)
        value[:0]
    except (TypeError, KeyError, IndexError):
        return False
    return True


def _check_enough(given: NDArray[Any], counts: Int64Array, lens: Int64Array, page_size: int) -> None:
    short = np.flatnonzero(given < counts)
    if len(short):
        r = int(short[0])
        raise InvalidBatchError(
            f"request {r}: its table has {given[r]} pages, but seq_lens[{r}] = {lens[r]} needs {counts[r]} "
            f"at page_size={page_size}: allocate the step's pages before planning"
        )


def _check_num_tables(num_tables: int, num_requests: int) -> None:
    # More tables than lengths is usual: persistent 2-D tables have a row per slot, not per request.
    if num_tables < num_requests:
        raise InvalidBatchError(
            f"{num_tables} block tables for {num_requests} seq_lens: give one per request, in the same order"
        )


def _from_padded(table: NDArray[Any], counts: Int64Array, lens: Int64Array, config: CascadeConfig) -> NDArray[Any]:
    _check_num_tables(len(table), len(counts))
    _check_enough(np.full(len(counts), table.shape[1]), counts, lens, config.page_size)
    longest = int(counts.max())
    used = table[: len(counts), :longest]
    if int(counts.sum()) * SPARSE_TABLE < used.size:
        # A few long requests among short ones: do not touch the whole rectangle.
        return np.concatenate([row[:count] for row, count in zip(used, counts.tolist(), strict=True)])
    inside = np.arange(longest) < counts[:, None]
    return used.reshape(-1) if inside.all() else used[inside]


def _from_csr(tables: CsrTables, counts: Int64Array, lens: Int64Array, config: CascadeConfig) -> NDArray[Any]:
    starts = int_vector("kv_indptr", tables.kv_indptr)
    indices = _integer_array("kv_indices", tables.kv_indices)
    if indices.ndim != 1:
        raise InvalidBatchError(f"kv_indices has shape {indices.shape}: give one page id per entry")
    if len(starts) != len(counts) + 1:
        raise InvalidBatchError(
            f"kv_indptr has {len(starts)} entries for {len(counts)} seq_lens: give num_requests + 1"
        )
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        at = 0 if starts[0] else int(np.flatnonzero(starts[1:] < starts[:-1])[0]) + 1
        raise InvalidBatchError(f"kv_indptr[{at}] = {starts[at]}, but kv_indptr must start at 0 and never decrease")
    if starts[-1] > len(indices):
        raise InvalidBatchError(f"kv_indptr ends at {starts[-1]}, but kv_indices has {len(indices)} entries")
    given = np.diff(starts)
    _check_enough(given, counts, lens, config.page_size)
    if (given == counts).all():
        return indices[: int(starts[-1])]
    return indices[ranges(starts[:-1], counts)]


def _from_ragged(tables: Any, counts: Int64Array, lens: Int64Array, config: CascadeConfig) -> NDArray[Any]:
    if len(tables) != len(counts):
        raise InvalidBatchError(
            f"{len(tables)} block tables for {len(counts)} seq_lens: give one per request, in the same order"
        )
    for r, table in enumerate(tables):
        if not _is_indexable(table):
            raise InvalidBatchError(f"request {r}: {told('its table', table)}: give a sequence of page ids")
    _check_enough(np.array([len(table) for table in tables]), counts, lens, config.page_size)
    if all(isinstance(table, list) for table in tables):
        return _from_lists(tables, counts)
    parts = []
    for r, (table, count) in enumerate(zip(tables, counts.tolist(), strict=True)):
        part = _integer_array(f"request {r}: its table", table[:count])
        if part.ndim != 1:
            raise InvalidBatchError(f"request {r}: its table has shape {part.shape}: give one page id per entry")
        parts.append(part)
    return np.concatenate(parts)


def _from_lists(tables: Sequence[list[int]], counts: Int64Array) -> Int64Array:
    flat = array("q")
    for r, (table, count) in enumerate(zip(tables, counts.tolist(), strict=True)):
        try:
            flat.fromlist(table if len(table) == count else table[:count])
        except (TypeError, OverflowError):
            for position, page in enumerate(table[:count]):
                try:
                    flat.append(page)
                except (TypeError, OverflowError) as error:
                    raise InvalidBatchError(
                        f"request {r}: page id {page!r} at position {position} is not a 64-bit integer"
                    ) from error
    ids = np.frombuffer(flat, np.int64) if flat else np.empty(0, np.int64)
    # Bools became 0 and 1: few page ids are, so that looking at these alone costs next to nothing.
    ends = counts.cumsum()
    for at in np.flatnonzero(ids.view(np.uint64) <= 1).tolist():
        r = int(np.searchsorted(ends, at, side="right"))
        position = at - int(ends[r] - counts[r])
        if isinstance(tables[r][position], bool):
            raise InvalidBatchError(
                f"request {r}: page id {tables[r][position]} at position {position} is a bool: give integers"
            )
    return ids
