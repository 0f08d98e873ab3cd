"""GPU times that can be compared: CUDA-graph replay over rotating KV caches, interleaved, with their spread."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer_cascade.config import CascadeConfig

MIN_ROTATED_BYTES = 300_000_000
"""KV over all sets: several times the L2 of any GPU, so that no set is still in it when its turn comes again."""

MIN_SETS, FEWEST_SETS = 4, 2
"""Sets to rotate over, and how few will do where the pool holds no more sets of `MIN_ROTATED_BYTES` together."""

MIN_CALLS = 24
MIN_REPLAY_US = 3000.0
"""A replay makes so many calls or takes so long: its fixed cost is spread over them."""

LONG_REPLAY_US = 10_000.0
"""Replays of so long are few."""


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
        num_bytes: in all; at least twice the largest cache.
        dtype: of the KV.
        device: where.

    Attributes:
        dtype: of the KV.
        device: where.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        size = num_bytes // dtype.itemsize
        self.dtype, self.device = dtype, device
        self._pool = torch.empty(size, dtype=dtype, device=device)
        for begin in range(0, size, 2**28):
            piece = self._pool[begin : begin + 2**28]
            piece.copy_(torch.randn(len(piece), dtype=torch.float16, device=device))

    def caches(self, config: CascadeConfig, num_pages: int) -> list[torch.Tensor]:
        """Distinct caches of this shape, as many as make a rotation.

        Raises:
            MemoryError: the pool holds fewer than that takes.
        """
        shape = (num_pages, 2, *config.page_shape)
        size = math.prod(shape)
        enough = -(-MIN_ROTATED_BYTES // (size * self._pool.itemsize))
        wanted = max(MIN_SETS, enough)
        if wanted * size > len(self._pool):
            wanted = max(FEWEST_SETS, enough, len(self._pool) // size)
        if wanted * size > len(self._pool):
            raise MemoryError(
                f"{wanted} caches of {size * self._pool.itemsize / 1e9:.1f} GB exceed the pool of "
                f"{len(self._pool) * self._pool.itemsize / 1e9:.1f} GB: give it more"
            )
        return [self._pool[i * size : (i + 1) * size].view(shape) for i in range(wanted)]


Call = Callable[[torch.Tensor], torch.Tensor]
"""What is timed: given a KV cache, returns attention's output."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph of calls.

    Attributes:
        graph: calls once per cache, around and around.
        num_calls: calls of a replay.
        out: what the last of them returned; a replay writes it anew.
    """

    graph: torch.cuda.CUDAGraph
    num_calls: int
    out: torch.Tensor

    def rerun(self) -> torch.Tensor:
        """`out` of one more replay, which began with NaN in it."""
        self.out.fill_(math.nan)
        self.graph.replay()
        torch.cuda.synchronize(self.out.device)
        return self.out


def capture(call: Call, caches: Sequence[torch.Tensor]) -> Captured:
    """Warm up a call, and capture it for each cache, the last of them last."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(caches[0])  # compiles what has to be
        us = _elapsed_us(lambda: call(caches[-1]))
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-min(MIN_CALLS, math.ceil(MIN_REPLAY_US / us)) // len(caches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for cache in caches:
                out = call(cache)
    return Captured(graph, rounds * len(caches), out)


def take_turns(captured: dict[str, Captured], repeats: int = 5, replays: int = 5) -> dict[str, Time]:
    """Time captured calls, turn and turn about.

    Args:
        captured: by name.
        repeats: how often the turn comes around; the spread over these says what a difference is worth.
        replays: of each graph in each turn; two where they are long.
    """
    medians: dict[str, list[float]] = {name: [] for name in captured}
    num_replays = {
        name: min(replays, 2) if _elapsed_us(one.graph.replay) > LONG_REPLAY_US else replays
        for name, one in captured.items()
    }
    for turn in range(repeats):
        # In another order every turn: what runs before a call heats the GPU for it.
        order = [*captured.items()]
        random.Random(turn).shuffle(order)
        for name, one in order:
            times = [_elapsed_us(one.graph.replay) for _ in range(num_replays[name])]
            medians[name].append(statistics.median(times) / one.num_calls)
    return {name: Time(statistics.median(times), tuple(times)) for name, times in medians.items()}


def measure(calls: dict[str, Call], caches: Sequence[torch.Tensor]) -> dict[str, Time]:
    """Capture several calls on the same caches, and time them turn and turn about."""
    return take_turns({name: capture(call, caches) for name, call in calls.items()})


def _elapsed_us(launch: Callable[[], object]) -> float:
    """Microseconds that work takes on the device, without what launching it costs the host."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Keeps the GPU busy while the host launches, so that the work starts the moment it is its turn.
    torch.cuda._sleep(200_000)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
