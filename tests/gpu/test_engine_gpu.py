"""A small engine with CUDA graphs: cascades and flat agree, whatever is shared, forked, preempted and replayed."""

import numpy as np
import pytest

from flashinfer_cascade import PlannerPolicy
from flashinfer_cascade.engine.compare import check_logits
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.engine import Engine
from flashinfer_cascade.engine.model import Llama, ModelShape
from flashinfer_cascade.engine.requests import Request

pytestmark = pytest.mark.gpu

# The kernels of 8B models, on narrow layers.
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=512,
    intermediate_size=1024,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=4096,
)
LEVELS = PlannerPolicy(executor="levels", fold=False)


@pytest.fixture(scope="module", name="model")
def model_fixture(device):
    return Llama(SHAPE, 1024, device)


def requests_of():
    rng = np.random.default_rng(0)
    root = rng.integers(SHAPE.vocab_size, size=515).tolist()
    requests = [Request(id, root + rng.integers(SHAPE.vocab_size, size=9 + 7 * id).tolist(), 40) for id in range(8)]
    requests += [Request(8, root[:333], 50, num_samples=6), Request(9, root[:20], 20, num_samples=2)]
    return requests


# With so few pages the batch does not fit: sequences are preempted and computed again.
@pytest.mark.parametrize("num_pages", [1000, 75])
@pytest.mark.parametrize("policy", [PlannerPolicy(), LEVELS], ids=["auto", "levels"])
def test_cascades_agree_with_flat(num_pages, policy, model):
    config = EngineConfig(num_pages=num_pages, max_batch_size=16, max_num_tokens=256, max_seq_len=1024)
    engine = Engine(model, config)
    found = check_logits(engine, requests_of(), policy)
    assert found.ok, found
    assert found.num_rows == 8 * 40 + 6 * 50 - 5 + 2 * 20 - 1  # samples of a prompt share one row
    for _ in range(2):
        served = engine.run(requests_of(), policy)
        assert served.stats.graph_replays == served.stats.num_decode_steps > 40
        assert served.scheduling.copied_pages >= 3
        assert (served.scheduling.preemptions > 0) == (num_pages == 75)
    if policy is LEVELS:
        assert served.stats.executors["decode", "levels"] > 40
        assert served.stats.read_tokens < 0.8 * served.stats.flat_tokens


def test_a_run_repeats_itself(model):
    engine = Engine(model, EngineConfig(num_pages=1000, max_batch_size=16, max_num_tokens=256, max_seq_len=1024))
    first, second = (engine.run(requests_of(), LEVELS).outputs for _ in range(2))
    assert first == second
