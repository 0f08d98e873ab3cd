"""GPU times that can be compared: CUDA-graph replay over rotating KV caches, interleaved, with their spread."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flashinfer_cascade.config import CascadeConfig

MIN_ROTATED_BYTES = 300_000_000
"""KV over all sets: several times the L2 of any GPU, so that no set is still in it when its turn comes again."""

MIN_SETS = 4
MIN_LAYERS = 24
"""Calls in one replay: its fixed cost is spread over them."""


class Time(NamedTuple):
    """Microseconds a call: over all repeats, and each repeat's median.

    Attributes:
        us: median of the repeats' medians.
        repeats_us: one median per interleaved repeat.
    """

    us: float
    repeats_us: tuple[float, ...]

    @property
    def spread_us(self) -> tuple[float, float]:
        """Lowest and highest repeat."""
        return min(self.repeats_us), max(self.repeats_us)


class KvPool:
    """Random KV that every measurement cuts its caches from.

    Args:
        num_bytes: in all; at least four times the largest cache.
        dtype: of the KV.
        device: where.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        size = num_bytes // dtype.itemsize
        self._pool = torch.empty(size, dtype=dtype, device=device)
        for begin in range(0, size, 2**28):
            piece = self._pool[begin : begin + 2**28]
            piece.copy_(torch.randn(len(piece), dtype=torch.float16, device=device))

    def caches(self, config: CascadeConfig, num_pages: int) -> list[torch.Tensor]:
        """Distinct caches of this shape, as many as make a rotation.

        Raises:
            MemoryError: the pool holds fewer than `MIN_SETS`.
        """
        shape = (num_pages, 2, *config.page_shape)
        size = math.prod(shape)
        wanted = max(MIN_SETS, -(-MIN_ROTATED_BYTES // (size * self._pool.itemsize)))
        if wanted * size > len(self._pool):
            raise MemoryError(
                f"{wanted} caches of {size * self._pool.itemsize / 1e9:.1f} GB exceed the pool of "
                f"{len(self._pool) * self._pool.itemsize / 1e9:.1f} GB"
            )
        return [self._pool[i * size : (i + 1) * size].view(shape) for i in range(wanted)]


Call = Callable[[torch.Tensor], object]


def capture(call: Call, caches: Sequence[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, int]:
    """One graph that calls once per cache, around and around; and how many calls that makes."""
    rounds = -(-MIN_LAYERS // len(caches))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(caches[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for cache in caches:
                call(cache)
    return graph, rounds * len(caches)


def measure(
    calls: dict[str, Call], caches: Sequence[torch.Tensor], repeats: int = 5, replays: int = 5
) -> dict[str, Time]:
    """Time several calls on the same caches, turn and turn about.

    Args:
        calls: name -> what to time, given one KV cache.
        caches: rotated over.
        repeats: how often the turn comes around; the spread over these says what a difference is worth.
        replays: of each call's graph in each turn.
    """
    graphs = {name: capture(call, caches) for name, call in calls.items()}
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for graph, _ in graphs.values():
        graph.replay()
    for turn in range(repeats):
        # In another order every turn: what runs before a call heats the GPU for it.
        order = [*graphs.items()]
        random.Random(turn).shuffle(order)
        for name, (graph, num_calls) in order:
            medians[name].append(_replay_us(graph, replays) / num_calls)
    return {name: Time(statistics.median(times), tuple(times)) for name, times in medians.items()}


def _replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Median microseconds of a replay, without what launching it costs the host."""
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Keeps the GPU busy while the host launches, so that the graph starts the moment it is its turn.
        torch.cuda._sleep(200_000)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return statistics.median(times)
