"""Ranks in processes of their own: each makes or gets the same plan, and computes its share of the heads."""

import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashinfer_cascade
from flashinfer_cascade import CascadeConfig, CascadePlanner, CascadeRuntime, PlannerPolicy
from flashinfer_cascade.testing import assert_close, dense_attention, make_kv_cache, make_q, plain_attention

WORKER = pathlib.Path(__file__).parent / "tp_worker.py"


def config_of(world, **changes):
    heads = {"num_qo_heads": 16 // world, "num_kv_heads": 8 // world}
    return CascadeConfig(**heads, head_dim=64, page_size=4, dtype="bfloat16", **changes)


def ask(messages):
    """Start a process for each message, all at once; their answers in order."""
    paths = [str(pathlib.Path(flashinfer_cascade.__file__).parents[1]), *sys.path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "random"}
    workers = [
        subprocess.Popen([sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        for _ in messages
    ]
    for worker, message in zip(workers, messages, strict=True):
        worker.stdin.write(pickle.dumps(message))
        worker.stdin.close()
    answers = [worker.stdout.read() for worker in workers]
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    return [pickle.loads(answer) for answer in answers]


def share(x, dim, rank, world):
    return x.chunk(world, dim)[rank].contiguous()


def check(outs, q, cache, batch):
    """Side by side the heads are those of one rank that has them all."""
    out, whole = torch.cat(outs, 1), config_of(1)
    tables, seq_lens, qo_lens = batch
    oracle, plain = (f(whole, q, cache, tables, seq_lens, qo_lens) for f in (dense_attention, plain_attention))
    assert_close(out, oracle[0], plain)
    runtime = CascadeRuntime(whole, "cpu")
    runtime.load(CascadePlanner(whole).plan(*batch))
    torch.testing.assert_close(out, runtime.run(q, cache), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_plan_again_from_what_is_broadcast(world, v0):
    runner = v0.Runner(num_heads=16 // world, num_kv_heads=8 // world)
    runner.init_cache()
    rng = np.random.default_rng(world)
    groups = v0.random_groups(rng, runner, prompts=True, decodes=True)
    metadata = runner.prepare(groups).attn_metadata
    assert metadata.plan.num_levels > 1
    batch = [list(values) for values in zip(*v0.scheduled(runner, groups), strict=True)]
    whole = config_of(1)
    q, cache = make_q(whole, sum(batch[2])), make_kv_cache(whole, runner.num_blocks)
    messages = [
        {
            "world": world,
            "metadata": metadata.asdict_zerocopy(),
            "q": share(q, 1, rank, world),
            "kv_cache": share(cache, 3, rank, world),
        }
        for rank in range(world)
    ]
    answers = ask(messages)
    for _, plan in answers:
        ours, theirs = metadata.plan.levels(), plan.levels()
        assert all(np.array_equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
        assert plan == answers[0][1]
    check([out for out, _ in answers], q, cache, batch)


def test_ranks_are_sent_the_plan():
    world = 2
    batch = [[*range(6), 100 + r] for r in range(7)] + [[50, 51]], [27] * 7 + [6], [1] * 6 + [2, 3]
    whole = config_of(1)
    q, cache = make_q(whole, sum(batch[2])), make_kv_cache(whole, 110)
    plan = CascadePlanner(config_of(world), PlannerPolicy(executor="levels", fold=False)).plan(*batch)
    assert plan.num_levels == 2
    messages = [
        {"plan": plan, "q": share(q, 1, rank, world), "kv_cache": share(cache, 3, rank, world)} for rank in range(world)
    ]
    answers = ask(messages)
    assert all(got == plan for _, got in answers)
    check([out for out, _ in answers], q, cache, batch)
