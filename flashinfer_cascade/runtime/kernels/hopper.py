"""Wide segments on Hopper: the blocks of `segments._block_kernel`, in Gluon.

What Triton's own pipelining does not do: the softmax of one tile overlaps the multiplication with V of the tile before.
For rows that see all of their segment, KV of 16 bits and no soft cap; items whose rows have more pieces than one, as
all have that several requests share.

Source: the order of operations is FlashAttention-3's intra-warpgroup overlap (arXiv:2407.08608, section 3.2).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIELDS = gl.constexpr(8)

# Renamed between Triton 3.6 and 3.9.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _offsets(pages, first_page, token, page_size: gl.constexpr, page_stride: gl.constexpr, token_stride: gl.constexpr):
    """Where tokens lie in the cache; page ids behind the last are read, and not used."""
    page = gl.load(pages + first_page + token // page_size).to(gl.int64)
    return page * page_stride + token % page_size * token_stride


@gluon.jit
def wide_kernel(
    q,
    k_cache,
    v_cache,
    items,
    pages,
    row_map,
    partial_indptr,
    partials,
    partial_lse,
    scale,
    q_row_stride,
    q_head_stride,
    num_heads: gl.constexpr,
    num_kv_heads: gl.constexpr,
    head_dim: gl.constexpr,
    page_size: gl.constexpr,
    page_stride: gl.constexpr,
    token_stride: gl.constexpr,
    head_stride: gl.constexpr,
    tile_rows: gl.constexpr,
    tile_tokens: gl.constexpr,
    stages: gl.constexpr,
    has_row_map: gl.constexpr,
    waits: gl.constexpr,
    triggers: gl.constexpr,
    num_warps: gl.constexpr,
):
    group: gl.constexpr = num_heads // num_kv_heads
    lanes: gl.constexpr = head_dim // 8 if head_dim // 8 < 32 else 32
    block: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])
    logits_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, tile_tokens, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, head_dim, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    dtype: gl.constexpr = k_cache.dtype.element_ty
    q_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_rows, head_dim], dtype)
    kv_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile_tokens, head_dim], dtype)
    by_row: gl.constexpr = gl.SliceLayout(1, block)
    by_dim: gl.constexpr = gl.SliceLayout(0, block)
    if triggers:
        gdc_launch_dependents()
    head = gl.program_id(0) % num_kv_heads
    item = items + gl.program_id(0) // num_kv_heads * FIELDS
    first_row = gl.load(item)
    num_rows = gl.load(item + 1)
    first_page = gl.load(item + 2)
    begin = gl.load(item + 3)
    end = gl.load(item + 4)
    slot = gl.load(item + 6)
    if num_rows > 0:
        tokens = gl.arange(0, tile_tokens, layout=by_row)
        dims = gl.expand_dims(gl.arange(0, head_dim, layout=by_dim), 0)
        k_head = k_cache + head * head_stride
        v_head = v_cache + head * head_stride
        k_ring = gl.allocate_shared_memory(dtype, [stages, tile_tokens, head_dim], kv_shared)
        v_ring = gl.allocate_shared_memory(dtype, [stages, tile_tokens, head_dim], kv_shared)
        num_tiles = (end - begin + tile_tokens - 1) // tile_tokens
        # The last tile, which may be short, comes first; then the others in order: tile number i > 0 is tile i - 1.
        last = begin + (num_tiles - 1) * tile_tokens
        inside = last + tokens < end
        page = gl.load(pages + first_page + (last + tokens) // page_size, mask=inside, other=0).to(gl.int64)
        offset = page * page_stride + (last + tokens) % page_size * token_stride
        where = gl.expand_dims(offset, 1) + dims
        mask = gl.expand_dims(inside, 1)
        copy_async(k_ring.index(0), k_head + where, mask=mask)
        async_copy.commit_group()
        packed = gl.arange(0, tile_rows, layout=by_row)
        rows = first_row + packed // group
        heads = head * group + packed % group
        real = packed < num_rows * group
        q_row = rows
        if has_row_map:
            q_row = gl.load(row_map + rows, mask=real, other=0)
        q_at = gl.expand_dims(q_row.to(gl.int64) * q_row_stride + heads * q_head_stride, 1) + dims
        queries = gl.load(q + q_at, mask=gl.expand_dims(real, 1), other=0.0)
        piece = gl.load(partial_indptr + rows, mask=real, other=0) + slot
        copy_async(v_ring.index(0), v_head + where, mask=mask)
        async_copy.commit_group()
        for stage in gl.static_range(1, stages):
            where = gl.expand_dims(
                _offsets(pages, first_page, begin + (stage - 1) * tile_tokens + tokens, page_size, page_stride, token_stride),
                1,
            ) + dims
            there = gl.expand_dims((tokens >= 0) & (stage < num_tiles), 1)
            copy_async(k_ring.index(stage), k_head + where, mask=there)
            async_copy.commit_group()
            if stage < stages - 1:
                copy_async(v_ring.index(stage), v_head + where, mask=there)
                async_copy.commit_group()
        q_tile = gl.allocate_shared_memory(dtype, [tile_rows, head_dim], q_shared, queries)
        # Committed so far: K0 V0 K1 V1 ... and the last K without its V, which is copied in the loop.
        async_copy.wait_group(2 * stages - 2)
        fence_async_shared()
        logits = warpgroup_mma(
            q_tile,
            k_ring.index(0).permute((1, 0)),
            gl.zeros([tile_rows, tile_tokens], gl.float32, logits_layout),
            use_acc=False,
        )
        column = gl.arange(0, tile_tokens, layout=gl.SliceLayout(0, logits_layout))
        logits = gl.where(gl.expand_dims(last + column < end, 0), logits, float("-inf"))
        highest = gl.max(logits, 1) * scale
        weights = gl.exp2(logits * scale - gl.expand_dims(highest, 1))
        total = gl.sum(weights, 1)
        operand = gl.convert_layout(weights.to(dtype), weights_layout)
        acc = gl.zeros([tile_rows, head_dim], gl.float32, out_layout)
        # Offsets of the next V, and of the K after it, whose page ids are read a tile ahead.
        v_offset = _offsets(
            pages, first_page, begin + (stages - 2) * tile_tokens + tokens, page_size, page_stride, token_stride
        )
        next_page = gl.load(pages + first_page + (begin + (stages - 1) * tile_tokens + tokens) // page_size)
        for number in range(1, num_tiles):
            # Needed now: K of this number, and V of the one before.
            async_copy.wait_group(2 * stages - 4)
            fence_async_shared()
            logits_now = warpgroup_mma(
                q_tile,
                k_ring.index(number % stages).permute((1, 0)),
                gl.zeros([tile_rows, tile_tokens], gl.float32, logits_layout),
                use_acc=False,
                is_async=True,
            )
            acc_now = warpgroup_mma(operand, v_ring.index((number - 1) % stages), acc, is_async=True)
            # The copies go where K of the number before and V of the one before that were read.
            v_number = number + stages - 2
            at = begin + v_number * tile_tokens + tokens
            k_offset = next_page.to(gl.int64) * page_stride + at % page_size * token_stride
            v_there = gl.expand_dims((tokens >= 0) & (v_number < num_tiles), 1)
            k_there = gl.expand_dims((tokens >= 0) & (v_number + 1 < num_tiles), 1)
            copy_async(
                v_ring.index(v_number % stages), v_head + (gl.expand_dims(v_offset, 1) + dims), mask=v_there
            )
            async_copy.commit_group()
            copy_async(
                k_ring.index((v_number + 1) % stages), k_head + (gl.expand_dims(k_offset, 1) + dims), mask=k_there
            )
            async_copy.commit_group()
            v_offset = k_offset
            next_page = gl.load(pages + first_page + (at + tile_tokens) // page_size)
            logits = warpgroup_mma_wait(num_outstanding=1, deps=[logits_now])
            new = gl.maximum(highest, gl.max(logits, 1) * scale)
            weights = gl.exp2(logits * scale - gl.expand_dims(new, 1))
            old = gl.exp2(highest - new)
            total = total * old + gl.sum(weights, 1)
            highest = new
            operand_now = gl.convert_layout(weights.to(dtype), weights_layout)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc_now])
            acc = acc * gl.expand_dims(gl.convert_layout(old, gl.SliceLayout(1, out_layout)), 1)
            operand = operand_now
        async_copy.wait_group(0)
        fence_async_shared()
        acc = warpgroup_mma(operand, v_ring.index((num_tiles - 1) % stages), acc)
        total_out = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
        highest_out = gl.convert_layout(highest, gl.SliceLayout(1, out_layout))
        value = gl.convert_layout((acc / gl.expand_dims(total_out, 1)).to(dtype), block)
        lse = gl.convert_layout(highest_out + gl.log2(total_out), by_row)
        at_piece = piece.to(gl.int64) * num_heads + heads
        gl.store(partials + gl.expand_dims(at_piece * head_dim, 1) + dims, value, mask=gl.expand_dims(real, 1))
        gl.store(partial_lse + at_piece, lse, mask=real)
    if waits:
        gdc_wait()
