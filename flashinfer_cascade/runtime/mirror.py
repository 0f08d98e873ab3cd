"""A session's page ids on the device: they follow the changes, and a load gathers from them what a plan reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flashinfer_cascade.csr import Int32Array, indptr, ranges
from flashinfer_cascade.pages import PageView
from flashinfer_cascade.runtime.kernels.pages import gather, scatter

MIN_MIRRORED_PAGES = 32768
"""Plans that read fewer page ids are gathered on the host: copying 128 kB costs less than two launches."""

MAX_WRITES = 65536
"""Entries written since the last plan above which the whole array is copied instead."""


class Update(NamedTuple):
    """What a load stages for the device, and the view that the copy then follows.

    Attributes:
        at: where in the array to write.
        values: what.
        begin: where in the array each run of the plan begins.
        out: [num_runs + 1], where it goes.
        pool_id, version: of the view.
    """

    at: Int32Array
    values: Int32Array
    begin: Int32Array
    out: Int32Array
    pool_id: int
    version: int

    @property
    def arrays(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """What is staged, one behind the other."""
        return self.at, self.values, self.begin, self.out


class PageMirror:
    """A copy of the page ids of one session, on the device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids = torch.empty(0, dtype=torch.int32, device=device)
        self._pool_id = self._version = 0
        # The kernels are compiled here rather than in the middle of serving.
        one = torch.zeros(2, dtype=torch.int32, device=device)
        scatter(one[:1], one[:1], one)
        gather(one[:1], one, one, one, 1)

    def follow(self, view: PageView, begins: list[Int32Array], counts: list[Int32Array]) -> Update:
        """What brings the copy up to a plan's view, and which runs the plan reads, level after level.

        Where too much has changed the whole array is copied at once, on the current stream.
        """
        writes = view.writes_since(self._pool_id, self._version)
        at = np.empty(0, np.int64)
        if writes is None or int((writes[1] - writes[0]).sum()) > MAX_WRITES:
            self._pool_id = 0  # until `apply`
            if len(self._ids) != len(view.ids):
                self._ids.record_stream(torch.cuda.current_stream(self._device))
                # Room for what the pool may still use of its array.
                self._ids = torch.empty(len(view.ids), dtype=torch.int32, device=self._device)
            pinned = torch.from_numpy(np.array(view.ids[: view.size])).pin_memory()
            self._ids[: view.size].copy_(pinned, non_blocking=True)
        elif writes.shape[1]:
            at = ranges(writes[0], writes[1] - writes[0])
        out = indptr(np.concatenate(counts)).astype(np.int32)
        begin = np.concatenate(begins)
        return Update(at.astype(np.int32), view.ids[at], begin, out, view.pool_id, view.version)

    def apply(self, update: Update, staged: torch.Tensor, into: torch.Tensor) -> None:
        """Bring the copy up to date, and gather a plan's page ids from it.

        Args:
            update: what was staged.
            staged: int32, on the device: its arrays, one behind the other.
            into: int32[*], on the device: the page ids that the kernels read.
        """
        at, values, begin, out = staged.split([len(array) for array in update.arrays])
        if len(at):
            scatter(at, values, self._ids)
        gather(begin, out, self._ids, into, int(np.diff(update.out).max(initial=0)))
        self._pool_id, self._version = update.pool_id, update.version
