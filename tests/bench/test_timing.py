"""Turns, medians and caches; what needs a GPU is tested in tests/gpu."""

import types

import pytest

torch = pytest.importorskip("torch")

from flashinfer_cascade.bench import timing  # noqa: E402
from flashinfer_cascade.bench.timing import KvPool, Time, take_turns  # noqa: E402
from flashinfer_cascade.bench.workloads import tree  # noqa: E402

WORK = tree("1,2_16,16")  # 3 pages
CONFIG = WORK.config(2, 1, 64)
SIZE = 3 * 2 * 16 * 64  # elements of its cache


def pool(caches, dtype=torch.bfloat16):
    return KvPool(int(caches * SIZE) * dtype.itemsize, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_caches_are_distinct_and_as_many_as_the_rotation_takes(dtype, monkeypatch):
    monkeypatch.setattr(timing, "MIN_ROTATED_BYTES", 19 * SIZE * dtype.itemsize // 2)
    caches = pool(12, dtype).caches(CONFIG, 3)
    assert len(caches) == 10
    assert all(cache.shape == (3, 2, 16, 1, 64) and cache.dtype == dtype for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == 10
    assert all(cache.float().isfinite().all() and cache.float().std() > 0.5 for cache in caches)


def test_large_caches_make_do_with_fewer_sets(monkeypatch):
    monkeypatch.setattr(timing, "MIN_ROTATED_BYTES", SIZE)
    assert [len(pool(n).caches(CONFIG, 3)) for n in (9, 4, 3.5, 2)] == [4, 4, 3, 2]
    with pytest.raises(MemoryError, match=r"2 caches of 0\.0 GB exceed the pool of 0\.0 GB: give it more"):
        pool(1.9).caches(CONFIG, 3)


def test_fewer_sets_never_rotate_over_too_little(monkeypatch):
    monkeypatch.setattr(timing, "MIN_ROTATED_BYTES", 3 * SIZE * 2)
    assert len(pool(3.5).caches(CONFIG, 3)) == 3
    with pytest.raises(MemoryError, match="3 caches"):
        pool(2.5).caches(CONFIG, 3)


def test_turns_go_around_in_changing_order_and_each_repeat_has_its_median(monkeypatch):
    launched = []
    lengths = {"fast": iter([10, 12, 11, 900] * 9), "slow": iter([40, 44, 42, 41] * 9)}

    def fake(name):
        graph = types.SimpleNamespace(replay=name)
        return types.SimpleNamespace(graph=graph, num_calls=2)

    def elapsed(name):
        launched.append(name)
        return next(lengths[name])

    monkeypatch.setattr(timing, "_elapsed_us", elapsed)
    times = take_turns({name: fake(name) for name in lengths}, repeats=3, replays=3)
    assert launched[:2] == ["fast", "slow"]  # a look at how long each takes
    turns = [launched[2 + 3 * i : 5 + 3 * i] for i in range(6)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert [{turns[2 * i][0], turns[2 * i + 1][0]} for i in range(3)] == [{"fast", "slow"}] * 3
    assert len({turns[2 * i][0] for i in range(3)}) == 2
    # fast: 12 11 900, 10 12 11, 900 10 12 by two calls.
    assert times["fast"] == Time(6, (6, 5.5, 6))
    assert times["fast"].spread_us == (5.5, 6)


def test_long_replays_are_few(monkeypatch):
    launched = []

    def elapsed(name):
        launched.append(name)
        return {"short": 10, "long": 20_000}[name]

    monkeypatch.setattr(timing, "_elapsed_us", elapsed)
    one = {
        name: types.SimpleNamespace(graph=types.SimpleNamespace(replay=name), num_calls=1) for name in ("short", "long")
    }
    take_turns(one, repeats=2, replays=5)
    assert (launched.count("short"), launched.count("long")) == (1 + 2 * 5, 1 + 2 * 2)
