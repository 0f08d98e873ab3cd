"""Attention over segments: two kernels that read what `lower.lower` lays out, whatever the tree looks like.

Query rows are read through their plan rows, so that nothing is gathered before; query heads of one KV head are packed
into the rows of a tile. A row with one piece goes straight to ``out``, the others leave partial results for
`combine`.

Kernels follow each other with programmatic dependent launch: one may begin while the one before still runs, since no
two write to one place. Each block, idle ones included, waits for that kernel before it ends, so that whoever waits for
the last kernel has waited for all.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4, which torch 2.8 brings
    HAS_DEPENDENT_LAUNCHES = False

    @triton.jit
    def gdc_launch_dependents():
        """Not there: launches follow each other."""

    @triton.jit
    def gdc_wait():
        """Likewise."""
else:
    HAS_DEPENDENT_LAUNCHES = True

LOG2E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(8)
"""Numbers of an item: `lower.Lowered` says which."""


@triton.jit
def _peek(pointers, opaque: tl.constexpr):
    """Load int32 within a pipelined loop, out of sight of the compiler's pipelining of loads."""
    if opaque:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.load(pointers)


@triton.jit
def _attend(
    q,
    k,
    v,
    acc,
    highest,
    total,
    scale,
    soft_cap,
    seen,
    masked: tl.constexpr,
    causal: tl.constexpr,
    capped: tl.constexpr,
):
    """One tile of KV: online softmax in base 2. `seen` is [1 or rows, tokens]."""
    logits = tl.dot(q, tl.trans(k.to(q.dtype)))
    if capped:
        # cap * tanh(x / cap), of which scale / cap is passed as scale
        logits = soft_cap * (1.0 - 2.0 / (tl.exp2(logits * (scale * 2.0 * LOG2E)) + 1.0)) * LOG2E
        step = 1.0
    else:
        step = scale
    if masked:
        logits = tl.where(seen, logits, float("-inf"))
    new = tl.maximum(highest, tl.max(logits, 1) * step)
    base = new
    if causal:  # a row that has seen nothing yet
        base = tl.where(new > float("-inf"), new, 0.0)
    weights = tl.exp2(logits * step - base[:, None])
    old = tl.exp2(highest - base)
    total = total * old + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * old[:, None])
    return acc, new, total


@triton.jit
def _finish(
    acc,
    highest,
    total,
    rows,
    heads,
    real,
    is_lone,
    piece,
    row_map,
    partials,
    partial_lse,
    out,
    lse,
    sinks,
    v_scale,
    out_row_stride,
    out_head_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    causal: tl.constexpr,
    has_row_map: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
):
    """Write what an item's rows came to: to out if it is their only piece, which is then so for all of them."""
    dims = tl.arange(0, head_dim)
    piece_lse = highest + tl.log2(total)
    scale = 1.0 / total
    if causal:
        piece_lse = tl.where(total > 0, piece_lse, float("-inf"))
        scale = tl.where(total > 0, scale, 0.0)
    if is_lone:
        target = rows
        if has_row_map:
            target = tl.load(row_map + rows, mask=real, other=0)
        scale = scale * v_scale
        if has_sinks:
            sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
            new = tl.maximum(piece_lse, sink)
            new = tl.where(new > float("-inf"), new, 0.0)
            weight = tl.exp2(piece_lse - new)
            denominator = weight + tl.exp2(sink - new)
            scale = tl.where(denominator > 0, scale * weight / denominator, 0.0)
            piece_lse = new + tl.log2(denominator)
        at_out = (target.to(tl.int64) * out_row_stride + heads.to(tl.int64) * out_head_stride)[:, None] + dims[None, :]
        tl.store(out + at_out, (acc * scale[:, None]).to(out.dtype.element_ty), mask=real[:, None])
        if has_lse:
            tl.store(lse + target * num_heads + heads, piece_lse, mask=real)
    else:
        at_piece = piece.to(tl.int64) * num_heads + heads
        value = (acc * scale[:, None]).to(partials.dtype.element_ty)
        tl.store(partials + at_piece[:, None] * head_dim + dims[None, :], value, mask=real[:, None])
        tl.store(partial_lse + at_piece, piece_lse, mask=real)


# What changes from batch to batch, or from layer to layer, must not be specialised on.
_UNSPECIALISED: dict[str, Any] = {
    "do_not_specialize": ["scale", "soft_cap", "v_scale"],
    "do_not_specialize_on_alignment": ["items", "count", "runs", "pages", "row_map", "row_pos", "partial_indptr"],
}


@triton.jit
def _block(
    item,
    head,
    q,
    k_cache,
    v_cache,
    pages,
    row_map,
    row_pos,
    partial_indptr,
    partials,
    partial_lse,
    out,
    lse,
    sinks,
    scale,
    soft_cap,
    v_scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    token_stride: tl.constexpr,
    head_stride: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    causal: tl.constexpr,
    capped: tl.constexpr,
    has_row_map: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
):
    """One item over one KV head."""
    group: tl.constexpr = num_heads // num_kv_heads
    first_row = tl.load(item)
    num_rows = tl.load(item + 1)
    first_page = pages + tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    full_end = begin + (tl.load(item + 5) - begin) // tile_tokens * tile_tokens
    slot = tl.load(item + 6)
    kv_start = tl.load(item + 7)
    k_head = k_cache + head.to(tl.int64) * head_stride
    v_head = v_cache + head.to(tl.int64) * head_stride
    packed = tl.arange(0, tile_rows)
    heads = head * group + packed % group
    tokens = tl.arange(0, tile_tokens)
    dims = tl.arange(0, head_dim)
    rows = first_row + packed // group
    real = packed < num_rows * group
    # Page ids are read a tile ahead: behind the last one lie numbers that are not used.
    page = tl.load(first_page + (begin + tokens) // page_size)
    q_row = rows
    if has_row_map:
        q_row = tl.load(row_map + rows, mask=real, other=0)
    at = (q_row.to(tl.int64) * q_row_stride + heads.to(tl.int64) * q_head_stride)[:, None] + dims[None, :]
    queries = tl.load(q + at, mask=real[:, None], other=0.0)
    piece = tl.load(partial_indptr + rows, mask=real, other=0) + slot
    acc = tl.zeros([tile_rows, head_dim], tl.float32)
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    if causal:
        visible = tl.load(row_pos + rows, mask=real, other=-1) + 1 - kv_start
    for at_token in tl.range(begin, full_end, tile_tokens, num_stages=stages):
        # Where tiles begin as pages do, this is the same for all of them.
        in_page = tokens % page_size if tile_tokens % page_size == 0 else (at_token + tokens) % page_size
        where = (page.to(tl.int64) * page_stride + in_page.to(tl.int64) * token_stride)[:, None] + dims[None, :]
        k = tl.load(k_head + where)
        v = tl.load(v_head + where)
        acc, highest, total = _attend(queries, k, v, acc, highest, total, scale, soft_cap, None, False, causal, capped)
        page = tl.load(first_page + (at_token + tile_tokens + tokens) // page_size)
    for at_token in tl.range(full_end, end, tile_tokens, num_stages=1):
        token = at_token + tokens
        inside = token < end
        page = tl.load(first_page + token // page_size, mask=inside, other=0)
        offset = page.to(tl.int64) * page_stride + (token % page_size).to(tl.int64) * token_stride
        where = offset[:, None] + dims[None, :]
        k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        seen = inside[None, :]
        if causal:
            seen = seen & (token[None, :] < visible[:, None])
        acc, highest, total = _attend(queries, k, v, acc, highest, total, scale, soft_cap, seen, True, causal, capped)
    _finish(
        acc,
        highest,
        total,
        rows,
        heads,
        real,
        slot < 0,
        piece,
        row_map,
        partials,
        partial_lse,
        out,
        lse,
        sinks,
        v_scale,
        out_row_stride,
        out_head_stride,
        num_heads,
        head_dim,
        causal,
        has_row_map,
        has_sinks,
        has_lse,
    )


@triton.jit(**_UNSPECIALISED)
def _block_kernel(
    items,
    count,
    q,
    k_cache,
    v_cache,
    pages,
    row_map,
    row_pos,
    partial_indptr,
    partials,
    partial_lse,
    out,
    lse,
    sinks,
    scale,
    soft_cap,
    v_scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    token_stride: tl.constexpr,
    head_stride: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    causal: tl.constexpr,
    capped: tl.constexpr,
    has_row_map: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    loops: tl.constexpr,
    first: tl.constexpr,
    waits: tl.constexpr,
    triggers: tl.constexpr,
):
    """Blocks of many rows: each item is a tile of rows over a run of KV.

    With `loops` programs stride over ``count`` items, whatever their number; else there is a program for each.
    """
    if first:
        gdc_wait()
    if triggers:
        gdc_launch_dependents()
    head = tl.program_id(0) % num_kv_heads
    number = tl.program_id(0) // num_kv_heads
    if loops:
        for index in tl.range(number, tl.load(count), tl.num_programs(0) // num_kv_heads, num_stages=1):
            item = items + index * FIELDS
            _block(
                item,
                head,
                q,
                k_cache,
                v_cache,
                pages,
                row_map,
                row_pos,
                partial_indptr,
                partials,
                partial_lse,
                out,
                lse,
                sinks,
                scale,
                soft_cap,
                v_scale,
                q_row_stride,
                q_head_stride,
                out_row_stride,
                out_head_stride,
                num_heads,
                num_kv_heads,
                head_dim,
                page_size,
                page_stride,
                token_stride,
                head_stride,
                tile_rows,
                tile_tokens,
                stages,
                causal,
                capped,
                has_row_map,
                has_sinks,
                has_lse,
            )
    else:
        item = items + number * FIELDS
        _block(
            item,
            head,
            q,
            k_cache,
            v_cache,
            pages,
            row_map,
            row_pos,
            partial_indptr,
            partials,
            partial_lse,
            out,
            lse,
            sinks,
            scale,
            soft_cap,
            v_scale,
            q_row_stride,
            q_head_stride,
            out_row_stride,
            out_head_stride,
            num_heads,
            num_kv_heads,
            head_dim,
            page_size,
            page_stride,
            token_stride,
            head_stride,
            tile_rows,
            tile_tokens,
            stages,
            causal,
            capped,
            has_row_map,
            has_sinks,
            has_lse,
        )
    if waits:
        gdc_wait()


@triton.jit(**_UNSPECIALISED)
def _stream_kernel(  # noqa: PLR0915  # one loop, whose state no helper could keep
    q,
    k_cache,
    v_cache,
    items,
    runs,
    pages,
    row_map,
    row_pos,
    partial_indptr,
    partials,
    partial_lse,
    out,
    lse,
    sinks,
    scale,
    soft_cap,
    v_scale,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    page_stride: tl.constexpr,
    token_stride: tl.constexpr,
    head_stride: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    stages: tl.constexpr,
    opaque: tl.constexpr,
    causal: tl.constexpr,
    capped: tl.constexpr,
    has_row_map: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    first: tl.constexpr,
    waits: tl.constexpr,
    triggers: tl.constexpr,
):
    """Items of few rows: their tiles of KV form one stream, cut into runs of equal length, one a block."""
    group: tl.constexpr = num_heads // num_kv_heads
    if first:
        gdc_wait()
    if triggers:
        gdc_launch_dependents()
    head = tl.program_id(0) % num_kv_heads
    run_number = tl.program_id(0) // num_kv_heads
    run = runs + run_number * FIELDS
    num_tiles = tl.load(run + 4)
    if num_tiles > 0:
        token = tl.load(run + 5)
        item = items + tl.load(run + 3) * FIELDS
        k_head = k_cache + head.to(tl.int64) * head_stride
        v_head = v_cache + head.to(tl.int64) * head_stride
        packed = tl.arange(0, tile_rows)
        heads = head * group + packed % group
        tokens = tl.arange(0, tile_tokens)
        dims = tl.arange(0, head_dim)
        acc = tl.zeros([tile_rows, head_dim], tl.float32)
        highest = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        first_row = tl.load(run)
        num_rows = tl.load(run + 1)
        page = tl.load(pages + tl.load(run + 2) + (token + tokens) // page_size)
        num_tokens = tl.load(item + 3)
        partial = tl.load(item + 4)
        is_lone = tl.load(item + 5)
        slot = tl.load(item + 6)
        kv_start = tl.load(item + 7)
        for index in tl.range(0, num_tiles, num_stages=stages):
            rows = first_row + packed // group
            real = packed < num_rows * group
            q_row = rows
            if has_row_map:
                q_row = tl.load(row_map + rows, mask=real, other=0)
            at = (q_row.to(tl.int64) * q_row_stride + heads.to(tl.int64) * q_head_stride)[:, None] + dims[None, :]
            queries = tl.load(q + at, mask=real[:, None], other=0.0)
            inside = token + tokens < num_tokens
            offset = page.to(tl.int64) * page_stride + ((token + tokens) % page_size).to(tl.int64) * token_stride
            where = offset[:, None] + dims[None, :]
            k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
            v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
            seen = inside[None, :]
            if causal:
                visible = tl.load(row_pos + rows, mask=real, other=-1) + 1 - kv_start
                seen = seen & ((token + tokens)[None, :] < visible[:, None])
            acc, highest, total = _attend(
                queries, k, v, acc, highest, total, scale, soft_cap, seen, True, causal, capped
            )
            ends = token + tile_tokens >= num_tokens
            if ends | (index == num_tiles - 1):
                others = packed >= group  # rows behind the first
                piece = tl.load(partial_indptr + rows, mask=real & others, other=0)
                piece = tl.where(others, piece, partial) + slot + run_number
                _finish(
                    acc,
                    highest,
                    total,
                    rows,
                    heads,
                    real,
                    is_lone != 0,
                    piece,
                    row_map,
                    partials,
                    partial_lse,
                    out,
                    lse,
                    sinks,
                    v_scale,
                    out_row_stride,
                    out_head_stride,
                    num_heads,
                    head_dim,
                    causal,
                    has_row_map,
                    has_sinks,
                    has_lse,
                )
            # A new item begins with nothing, not even with the NaN that the one before may have come to.
            highest = tl.where(ends, float("-inf"), highest)
            total = tl.where(ends, 0.0, total)
            acc = tl.where(ends, 0.0, acc)
            # The next tile: of this item, or the first of the next. The list ends with an item of zeros.
            item += tl.where(ends, FIELDS, 0)
            token = tl.where(ends, 0, token + tile_tokens)
            page = _peek(pages + _peek(item + 2, opaque) + (token + tokens) // page_size, opaque)
            first_row = _peek(item, opaque)
            num_rows = _peek(item + 1, opaque)
            num_tokens = _peek(item + 3, opaque)
            partial = _peek(item + 4, opaque)
            is_lone = _peek(item + 5, opaque)
            slot = _peek(item + 6, opaque)
            kv_start = _peek(item + 7, opaque)
    if waits:
        gdc_wait()


@triton.jit(
    do_not_specialize_on_alignment=["row_map", "partial_indptr", "combined", "sinks", "lse"],
    do_not_specialize=["v_scale"],
)
def _combine_kernel(
    partials,
    partial_lse,
    partial_indptr,
    combined,
    row_map,
    sinks,
    out,
    lse,
    v_scale,
    out_row_stride,
    out_head_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads_per_program: tl.constexpr,
    pieces_at_once: tl.constexpr,
    has_row_map: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    first: tl.constexpr,
    waits: tl.constexpr,
):
    """All pieces of one row and some of its heads."""
    row = tl.program_id(0)
    begin = tl.load(partial_indptr + row)
    count = tl.load(combined + row)
    heads = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)
    dims = tl.arange(0, head_dim)
    real = heads < num_heads
    if first or waits:
        gdc_wait()
    if count >= 0:
        pieces = tl.arange(0, pieces_at_once)
        highest = tl.full([heads_per_program], float("-inf"), tl.float32)
        total = tl.zeros([heads_per_program], tl.float32)
        acc = tl.zeros([heads_per_program, head_dim], tl.float32)
        for at_piece in tl.range(0, count, pieces_at_once):
            at = (begin + at_piece + pieces).to(tl.int64)[:, None] * num_heads + heads[None, :]
            there = (at_piece + pieces < count)[:, None] & real[None, :]
            here = tl.load(partial_lse + at, mask=there, other=float("-inf"))
            value = tl.load(
                partials + at[:, :, None] * head_dim + dims[None, None, :], mask=there[:, :, None], other=0.0
            ).to(tl.float32)
            new = tl.maximum(highest, tl.max(here, 0))
            base = tl.where(new > float("-inf"), new, 0.0)
            weight = tl.exp2(here - base[None, :])
            old = tl.exp2(highest - base)
            acc = acc * old[:, None] + tl.sum(value * weight[:, :, None], 0)
            total = total * old + tl.sum(weight, 0)
            highest = new
        base = tl.where(highest > float("-inf"), highest, 0.0)
        if has_sinks:
            # A sink is a logit without a value: it adds to the denominator alone.
            sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
            new = tl.maximum(highest, sink)
            base = tl.where(new > float("-inf"), new, 0.0)
            old = tl.exp2(highest - base)
            acc = acc * old[:, None]
            total = total * old + tl.exp2(sink - base)
        scale = tl.where(total > 0, v_scale / tl.where(total > 0, total, 1.0), 0.0)
        target = row
        if has_row_map:
            target = tl.load(row_map + row)
        at_out = target.to(tl.int64) * out_row_stride + heads.to(tl.int64)[:, None] * out_head_stride + dims[None, :]
        tl.store(out + at_out, (acc * scale[:, None]).to(out.dtype.element_ty), mask=real[:, None])
        if has_lse:
            tl.store(lse + target * num_heads + heads, base + tl.log2(total), mask=real)
