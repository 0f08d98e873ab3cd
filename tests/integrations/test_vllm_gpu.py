"""The stand-in runner on a GPU: the same steps, eager and in graphs that torch captured."""

import numpy as np
import pytest
import torch

from flashinfer_cascade.integrations.vllm_v0 import make_backend

pytestmark = pytest.mark.gpu


def write_kv(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """What a graph can hold, as vLLM's own can: tokens that go nowhere go to the last slot."""
    num_blocks, block_size = key_cache.shape[:2]
    slots = torch.where(slot_mapping < 0, num_blocks * block_size - 1, slot_mapping)
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // block_size, slots % block_size] = new


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_random_steps(layout, graphs, v0):
    backend = make_backend(write_kv=write_kv, kv_layout=layout, policy=v0.FORCED)
    runner = v0.Runner(
        backend=backend, num_heads=8, head_size=128, scale=128**-0.5, block_size=16, num_layers=2, device="cuda"
    )
    runner.init_cache()
    if graphs:
        runner.capture()
    cascaded = in_graphs = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        prompts = seed % 4 == 0
        groups = v0.random_groups(rng, runner, prompts=prompts, decodes=not prompts or not graphs)
        metadata = v0.check_step(runner, groups, seed)
        cascaded += metadata.plan.num_levels > 1
        in_graphs += metadata.graph is not None
    assert cascaded >= 4
    assert in_graphs == (9 if graphs else 0)
