"""Merge the partial results of all levels at once, in one pass over each row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


# What changes from batch to batch must not be specialised on: each new value would compile the kernel anew, in the
# middle of serving. Partial results and out are left out of that: torch aligns them, and vector loads need to know.
@triton.jit(
    do_not_specialize=["num_levels", "lse_level_stride", "num_heads"],
    do_not_specialize_on_alignment=["partial_lse", "row_map", "active", "sinks", "lse"],
)
def _merge_kernel(
    partials,
    partial_lse,
    row_map,
    active,
    sinks,
    out,
    lse,
    v_scale,
    num_levels,
    level_stride,
    lse_level_stride,
    out_row_stride,
    out_head_stride,
    num_heads,
    head_dim: tl.constexpr,
    heads_per_program: tl.constexpr,
    has_row_map: tl.constexpr,
    has_active: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)
    dims = tl.arange(0, head_dim)
    real = heads < num_heads
    at_lse = row * num_heads + heads
    at = at_lse[:, None] * head_dim + dims[None, :]
    highest = tl.full([heads_per_program], float("-inf"), tl.float32)
    total = tl.zeros([heads_per_program], tl.float32)
    acc = tl.zeros([heads_per_program, head_dim], tl.float32)
    for level in range(num_levels):
        # Partial results of all levels may hold more than 2**31 numbers.
        before = tl.cast(level, tl.int64)
        here = tl.load(partial_lse + before * lse_level_stride + at_lse, mask=real, other=float("-inf"))
        if has_active:
            here = tl.where(tl.load(active + level) != 0, here, float("-inf"))
        seen = here > float("-inf")
        new = tl.maximum(highest, here)
        # Where nothing was seen yet both are -inf, and their difference would be NaN.
        old_weight = tl.where(highest > float("-inf"), tl.exp2(highest - new), 0.0)
        weight = tl.where(seen, tl.exp2(here - new), 0.0)
        value = tl.load(partials + before * level_stride + at, mask=seen[:, None], other=0.0).to(tl.float32)
        acc = acc * old_weight[:, None] + value * weight[:, None]
        total = total * old_weight + weight
        highest = new
    merged_lse = tl.where(total > 0, highest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    scale = tl.where(total > 0, v_scale / tl.where(total > 0, total, 1.0), 0.0)
    if has_sinks:
        # A sink is a logit without a value: it adds to the denominator alone.
        sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2E
        new = tl.maximum(merged_lse, sink)
        weight = tl.where(merged_lse > float("-inf"), tl.exp2(merged_lse - new), 0.0)
        denominator = weight + tl.where(sink > float("-inf"), tl.exp2(sink - new), 0.0)
        scale = scale * tl.where(denominator > 0, weight / tl.where(denominator > 0, denominator, 1.0), 0.0)
        merged_lse = tl.where(denominator > 0, new + tl.log2(tl.where(denominator > 0, denominator, 1.0)), new)
    target = row
    if has_row_map:
        target = tl.load(row_map + row).to(tl.int64)
    at_out = target * out_row_stride + heads.to(tl.int64)[:, None] * out_head_stride + dims[None, :]
    tl.store(out + at_out, (acc * scale[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    if has_lse:
        tl.store(lse + target * num_heads + heads, merged_lse, mask=real)


def merge(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    *,
    row_map: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    v_scale: float = 1.0,
    lse: torch.Tensor | None = None,
) -> None:
    """Merge partial attention results of every row, safe for rows that saw nothing in some or in all levels.

    Args:
        partials: [num_levels, num_rows, num_qo_heads, head_dim], contiguous per level; ignored where its lse is -inf.
        partial_lse: float32[num_levels, num_rows, num_qo_heads], base 2, contiguous per level.
        out: [*, num_qo_heads, head_dim], last dimension contiguous; row ``row_map[r]`` gets the result of row r.
        row_map: int32[num_rows]; None is the identity.
        active: int32[num_levels], 0 for levels that hold nothing to be read; None is all.
        sinks: [num_qo_heads], natural-log logits that join the denominator; None is none.
        v_scale: multiplies the result.
        lse: float32[*, num_qo_heads], contiguous, base 2, sinks included; None is not wanted.
    """
    num_levels, num_rows, num_heads, head_dim = partials.shape
    heads_per_program = min(4, triton.next_power_of_2(num_heads))
    grid = (num_rows, triton.cdiv(num_heads, heads_per_program))
    _merge_kernel[grid](
        partials,
        partial_lse,
        row_map,
        active,
        sinks,
        out,
        lse,
        v_scale,
        num_levels,
        partials.stride(0),
        partial_lse.stride(0),
        out.stride(0),
        out.stride(1),
        num_heads,
        head_dim=head_dim,
        heads_per_program=heads_per_program,
        has_row_map=row_map is not None,
        has_active=active is not None,
        has_sinks=sinks is not None,
        has_lse=lse is not None,
        num_warps=1,
    )
