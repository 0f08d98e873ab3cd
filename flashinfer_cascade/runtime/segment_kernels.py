"""The segments executor's launches for one layer: wide, short and narrow segments, then one merge of what was cut."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.lower import Tiling
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.cuda import Order, Tables, launch_stream, launch_wide
from flashinfer_cascade.runtime.kernels.segments import LOG2E, _block_kernel, _combine_kernel, _stream_kernel

MAX_FEW_ROWS = 32
"""Rows up to which a merge leaves most of the GPU idle, unless each head has a program, and reads many at once."""


class SegmentArrays(NamedTuple):
    """A `lower.Lowered` on the device, int32; what an eager run has no items for is None.

    Attributes:
        wide: [*, FIELDS], items.
        num_wide: [2], their number, and how many of them are of two tiles, where these may change from one run to the
            next; else None: it is wide's length.
        num_double: those of two tiles, if `num_wide` is None.
        short, short_runs, narrow, narrow_runs, partial_indptr, combined: as in `Lowered`.
        pages: page ids that items refer to, and `buffers.PAGE_SLACK` more numbers.
        row_map: [num_rows], row of q of each plan row of the part; None is the identity.
        row_pos: [num_rows], for causal parts; else None.
    """

    wide: torch.Tensor | None
    num_wide: torch.Tensor | None
    num_double: int
    short: torch.Tensor | None
    short_runs: torch.Tensor
    narrow: torch.Tensor | None
    narrow_runs: torch.Tensor
    partial_indptr: torch.Tensor
    combined: torch.Tensor
    pages: torch.Tensor
    row_map: torch.Tensor | None
    row_pos: torch.Tensor | None


class Partials(NamedTuple):
    """Where pieces go: [num_partials, num_qo_heads, head_dim], q's dtype, and float32[num_partials, num_qo_heads]."""

    values: torch.Tensor
    lse: torch.Tensor


_Launch = Callable[[Order], None]


class SegmentKernels:
    """Launches a lowered part's kernels, in order, on the current stream.

    Args:
        config: the attention.
        tiling: what parts are lowered for.
        interpreted: run by Triton's interpreter.
        dependent: use programmatic dependent launches, which GPUs have from sm_90 on.
    """

    def __init__(
        self, config: CascadeConfig, tiling: Tiling, *, interpreted: bool = False, dependent: bool = True
    ) -> None:
        self._config, self._tiling, self._interpreted = config, tiling, interpreted
        self._dependent = dependent and not interpreted

    def run(
        self,
        call: LayerCall,
        arrays: SegmentArrays,
        partials: Partials,
        *,
        num_rows: int,
        combines: bool,
    ) -> None:
        """Attend for the part's rows of q; writes exactly these rows of ``out`` and ``lse``.

        Args:
            call: the layer.
            arrays: the part.
            partials: room for its pieces.
            num_rows: of the part.
            combines: whether some row is left to be merged.
        """
        tiling = self._tiling
        common = self._common(call, arrays, partials)
        launches: list[_Launch] = []
        if arrays.wide is not None:
            if tiling.has_native_wide:
                launches.append(functools.partial(self._native_wide, call, arrays, partials))
            else:
                launches.append(self._wide(arrays.wide, arrays.num_wide, common))
        if arrays.short is not None:
            tile = tiling.short_rows, tiling.short_tile_tokens
            launches.append(self._stream(arrays.short, arrays.short_runs, tile, common))
        if arrays.narrow is not None:
            if tiling.is_native:
                launches.append(functools.partial(self._native, call, arrays, partials))
            else:
                tile = tiling.narrow_rows, tiling.narrow_tile_tokens
                launches.append(self._stream(arrays.narrow, arrays.narrow_runs, tile, common))
        if combines:
            launches.append(self._combine(call, arrays, partials, num_rows))
        dependent, last = self._dependent, len(launches) - 1
        for number, launch in enumerate(launches):
            launch(Order(dependent and number == 0, dependent and number > 0, dependent and number < last))

    def _wide(self, items: torch.Tensor, count: torch.Tensor | None, common: dict[str, Any]) -> _Launch:
        tiling = self._tiling
        blocks = len(items)
        if count is not None:
            blocks = min(blocks, max(tiling.num_runs(tiling.wide_blocks, self._config.num_kv_heads), 1))
        return self._triton(
            _block_kernel,
            (blocks * self._config.num_kv_heads,),
            common
            | {
                "items": items,
                "count": count,
                "loops": count is not None,
                "tile_rows": tiling.wide_rows,
                "tile_tokens": tiling.wide_tokens,
                "stages": tiling.wide_stages,
                "num_warps": tiling.wide_rows // 16,
            },
        )

    def _stream(
        self, items: torch.Tensor, runs: torch.Tensor, tile: tuple[int, int], common: dict[str, Any]
    ) -> _Launch:
        options = {"maxnreg": 128} if tile[0] == 16 and not self._interpreted else {}
        return self._triton(
            _stream_kernel,
            (len(runs) * self._config.num_kv_heads,),
            common
            | options
            | {
                "items": items,
                "runs": runs,
                "opaque": not self._interpreted,
                "tile_rows": tile[0],
                "tile_tokens": tile[1],
                "stages": 2,
                "num_warps": 2,
            },
        )

    def _native(self, call: LayerCall, arrays: SegmentArrays, partials: Partials, order: Order) -> None:
        assert arrays.narrow is not None
        rows = self._tiling.narrow_rows
        launch_stream(self._config, call, rows, arrays.narrow, arrays.narrow_runs, _tables(arrays, partials), order)

    def _native_wide(self, call: LayerCall, arrays: SegmentArrays, partials: Partials, order: Order) -> None:
        assert arrays.wide is not None
        counts = (len(arrays.wide), arrays.num_double) if arrays.num_wide is None else arrays.num_wide
        tables = _tables(arrays, partials)
        launch_wide(self._config, call, self._tiling.num_sms, arrays.wide, counts, tables, order)

    def _triton(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> _Launch:
        def launch(order: Order) -> None:
            options = {"launch_pdl": True} if order.first or order.waits else {}
            flags = {name: value for name, value in order._asdict().items() if name in kernel.arg_names}
            kernel[grid](**arguments, **flags, **options)

        return launch

    def _common(self, call: LayerCall, arrays: SegmentArrays, partials: Partials) -> dict[str, Any]:
        config = self._config
        k, v = (call.kv_cache[:, 0], call.kv_cache[:, 1]) if isinstance(call.kv_cache, torch.Tensor) else call.kv_cache
        token, head = (1, 2) if config.kv_layout == "NHD" else (2, 1)
        cap, natural = config.logits_soft_cap, config.softmax_scale * call.k_scale
        return {
            "q": call.q,
            "k_cache": k,
            "v_cache": v,
            "pages": arrays.pages,
            "row_map": arrays.row_map,
            "row_pos": arrays.row_pos,
            "partial_indptr": arrays.partial_indptr,
            "partials": partials.values,
            "partial_lse": partials.lse,
            "out": call.out,
            "lse": call.lse,
            "sinks": call.sinks,
            "scale": natural / cap if cap else natural * LOG2E.value,
            "soft_cap": cap,
            "v_scale": call.v_scale,
            "q_row_stride": call.q.stride(0),
            "q_head_stride": call.q.stride(1),
            "out_row_stride": call.out.stride(0),
            "out_head_stride": call.out.stride(1),
            "num_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": config.page_size,
            "page_stride": k.stride(0),
            "token_stride": k.stride(token),
            "head_stride": k.stride(head),
            "causal": arrays.row_pos is not None,
            "capped": cap > 0,
            "has_row_map": arrays.row_map is not None,
            "has_sinks": call.sinks is not None,
            "has_lse": call.lse is not None,
        }

    def _combine(self, call: LayerCall, arrays: SegmentArrays, partials: Partials, num_rows: int) -> _Launch:
        config = self._config
        per_program, at_once, warps = (1, 32, 4) if num_rows <= MAX_FEW_ROWS else (4, 4, 1)
        per_program = min(per_program, triton.next_power_of_2(config.num_qo_heads))
        return self._triton(
            _combine_kernel,
            (num_rows, triton.cdiv(config.num_qo_heads, per_program)),
            {
                "partials": partials.values,
                "partial_lse": partials.lse,
                "partial_indptr": arrays.partial_indptr,
                "combined": arrays.combined,
                "row_map": arrays.row_map,
                "sinks": call.sinks,
                "out": call.out,
                "lse": call.lse,
                "v_scale": call.v_scale,
                "out_row_stride": call.out.stride(0),
                "out_head_stride": call.out.stride(1),
                "num_heads": config.num_qo_heads,
                "head_dim": config.head_dim,
                "heads_per_program": per_program,
                "pieces_at_once": at_once,
                "has_row_map": arrays.row_map is not None,
                "has_sinks": call.sinks is not None,
                "has_lse": call.lse is not None,
                "num_warps": warps,
            },
        )


def _tables(arrays: SegmentArrays, partials: Partials) -> Tables:
    return Tables(arrays.pages, arrays.row_map, arrays.row_pos, arrays.partial_indptr, *partials)
