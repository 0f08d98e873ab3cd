"""The segments executor's launches for one layer: wide, short and narrow segments, then one merge of what was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from flashinfer_cascade.config import DTYPE_BYTES, CascadeConfig
from flashinfer_cascade.lower import FIELDS, Lowered, Tiling
from flashinfer_cascade.runtime.call import LayerCall
from flashinfer_cascade.runtime.stream import launch_stream
from flashinfer_cascade.runtime.kernels.segments import LOG2E, _block_kernel, _combine_kernel, _stream_kernel


STREAM_COLUMNS = 0
FIRST = True


class SegmentArrays(NamedTuple):
    """A `Lowered` on the device, int32; what has no items is None in an eager run.

    Attributes:
        wide: [*, FIELDS], items; behind them only zeros.
        short, short_runs, narrow, narrow_runs, partial_indptr, combined: as in `Lowered`.
        pages: page ids that items refer to, and at least a tile's more numbers behind them.
        row_map: [num_rows], row of q of each plan row of the part; None is the identity.
        row_pos: [num_rows], for causal parts; else None.
    """

    wide: torch.Tensor | None
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
    """Where pieces go: [num_partials, num_qo_heads, head_dim] of q's dtype, and float32 [num_partials, num_qo_heads]."""

    values: torch.Tensor
    lse: torch.Tensor


class SegmentKernels:
    """Launches a lowered part's kernels, in order, on the current stream.

    Args:
        config: the attention.
        tiling: what parts are lowered for.
        interpreted: run by Triton's interpreter, which knows no dependent launches.
    """

    def __init__(self, config: CascadeConfig, tiling: Tiling, *, interpreted: bool = False) -> None:
        self._config, self._tiling, self._interpreted = config, tiling, interpreted

    def run(
        self,
        call: LayerCall,
        arrays: SegmentArrays,
        partials: Partials,
        *,
        num_rows: int,
        wide_blocks: int,
        combines: bool,
    ) -> None:
        """Attend for the part's rows of q; writes exactly these rows of ``out`` and ``lse``.

        Args:
            call: the layer.
            arrays: the part.
            partials: room for its pieces.
            num_rows: of the part.
            wide_blocks: wide items, or those that there is room for.
            combines: whether some row is left to be merged.
        """
        config, tiling = self._config, self._tiling
        heads = config.num_kv_heads
        launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []
        wide, short, narrow = self._arguments(call, arrays, partials)
        if arrays.wide is not None and wide_blocks:
            options = {
                "tile_rows": tiling.wide_rows,
                "tile_tokens": tiling.wide_tokens,
                "stages": 3,
                "num_warps": tiling.wide_rows // 16,
            }
            launches.append((_block_kernel, (wide_blocks * heads,), wide | options))
        for items, runs, arguments, rows in (
            (arrays.short, arrays.short_runs, short, tiling.short_rows),
            (arrays.narrow, arrays.narrow_runs, narrow, tiling.narrow_rows),
        ):
            if items is not None:
                options = {
                    "opaque": not self._interpreted,
                    "tile_rows": rows,
                    "tile_tokens": tiling.narrow_tokens if rows == tiling.narrow_rows else tiling.short_tile_tokens,
                    "stages": 2,
                    "num_warps": 2,
                }
                if rows == tiling.narrow_rows:
                    options["maxnreg"] = 128
                if STREAM_COLUMNS and rows == tiling.narrow_rows:
                    launches.append((launch_stream, (), {}))
                    continue
                launches.append((_stream_kernel, (len(runs) * heads,), arguments | options))
        if combines:
            launches.append(self._combine(call, arrays, partials, num_rows))
        for number, (kernel, grid, arguments) in enumerate(launches):
            # Each may begin while the one before it still runs, the first one when all before has ended.
            follows = number > 0 and not self._interpreted
            first = FIRST and number == 0 and not self._interpreted
            arguments["waits"] = follows
            if kernel is not _combine_kernel:
                arguments["first"] = first
                arguments["triggers"] = number < len(launches) - 1 and not self._interpreted
            if follows or first:
                arguments["launch_pdl"] = True
            if self._interpreted:
                arguments.pop("maxnreg", None)
            if kernel is launch_stream:
                tables = arrays.narrow, arrays.narrow_runs, arrays.pages, arrays.partial_indptr
                launch_stream(
                    config,
                    call,
                    STREAM_COLUMNS,
                    tables,
                    arrays.row_map,
                    arrays.row_pos,
                    partials,
                    first=first,
                    follows=follows,
                    triggers=arguments["triggers"],
                )
                continue
            kernel[grid](**arguments)

    def _arguments(self, call: LayerCall, arrays: SegmentArrays, partials: Partials) -> Sequence[dict[str, Any]]:
        config = self._config
        k, v = (call.kv_cache[:, 0], call.kv_cache[:, 1]) if isinstance(call.kv_cache, torch.Tensor) else call.kv_cache
        token, head = (1, 2) if config.kv_layout == "NHD" else (2, 1)
        cap, natural = config.logits_soft_cap, config.softmax_scale * call.k_scale
        common = {
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
        return (
            common | {"items": arrays.wide},
            common | {"items": arrays.short, "runs": arrays.short_runs},
            common | {"items": arrays.narrow, "runs": arrays.narrow_runs},
        )

    def _combine(
        self, call: LayerCall, arrays: SegmentArrays, partials: Partials, num_rows: int
    ) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
        config = self._config
        # Few rows leave most of the GPU idle: then each head has a program that reads many pieces at once.
        per_program, at_once, warps = (4, 4, 1) if num_rows > 32 else (1, 32, 4)
        per_program = min(per_program, triton.next_power_of_2(config.num_qo_heads))
        arguments = {
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
        }
        return _combine_kernel, (num_rows, triton.cdiv(config.num_qo_heads, per_program)), arguments
