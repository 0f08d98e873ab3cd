"""Plan arrays on the device: one pinned staging area, one copy a load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.csr import Int32Array
from flashinfer_cascade.errors import CapacityError

ALIGNMENT = 4
"""Entries: arrays begin at multiples of 16 bytes, as torch's own allocations do."""

PAGE_SLACK = 256
"""Entries behind the last page id that the segments' kernels read and do not use."""


class StagingBuffer:
    """Copies a plan's int32 arrays to the device in one transfer, and owns where they lie there.

    Two pinned areas alternate, each guarded by an event, so that a load neither waits for the one before it nor
    overwrites what its copy still reads.

    Args:
        num_entries: int32 entries that one load may hold, alignment included.
        device: where to.
    """

    def __init__(self, num_entries: int, device: torch.device) -> None:
        self.num_entries = num_entries
        self.device = device
        self._pinned = [torch.empty(num_entries, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._host = [pinned.numpy() for pinned in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self.on_device = torch.empty(num_entries, dtype=torch.int32, device=device)

    @classmethod
    def for_config(cls, config: CascadeConfig, device: torch.device) -> StagingBuffer:
        """Large enough for any batch that `config` admits: its page ids and its row order, and PAGE_SLACK."""
        return cls(config.max_kv_indices + config.max_num_rows + 2 * ALIGNMENT + PAGE_SLACK, device)

    def copy(self, arrays: Sequence[Int32Array]) -> list[torch.Tensor]:
        """Copy on the current stream; the result's tensors are views of `on_device`, valid until the next copy.

        Raises:
            CapacityError: the arrays do not fit; nothing was written.
        """
        sizes = [-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays]
        total = sum(sizes)
        if total > self.num_entries:
            raise CapacityError(
                f"the plan's arrays hold {total} entries, above the {self.num_entries} reserved: "
                "raise max_kv_indices or max_num_rows in CascadeConfig"
            )
        turn = self._turn = 1 - self._turn
        self._copied[turn].synchronize()
        host = self._host[turn]
        views, begin = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            host[begin : begin + len(array)] = array
            views.append(self.on_device[begin : begin + len(array)])
            begin += size
        self.on_device[:total].copy_(self._pinned[turn][:total], non_blocking=True)
        self._copied[turn].record(torch.cuda.current_stream(self.device))
        return views


def to_int32(array: Int32Array) -> torch.Tensor:
    """A CPU tensor of its own: plan arrays are read-only, which torch cannot express."""
    return torch.from_numpy(np.array(array, np.int32))
