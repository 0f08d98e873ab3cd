"""The model and its dense twin, which share nothing but weights."""

import math

import pytest
import torch

from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.model import LLAMA_8B, QUERY_GAIN, TINY, Llama, dense_logits

MODEL = Llama(TINY, 64)
TOKENS = torch.randint(TINY.vocab_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def test_weights_follow_the_seed():
    same, other = Llama(TINY, 64, seed=0), Llama(TINY, 64, seed=1)
    assert torch.equal(same.layers[1].down, MODEL.layers[1].down)
    assert not torch.equal(other.layers[1].down, MODEL.layers[1].down)


def test_a_token_changes_what_comes_behind_it_and_nothing_before():
    changed = [*TOKENS[:20], (TOKENS[20] + 1) % TINY.vocab_size, *TOKENS[21:]]
    one, two = (dense_logits(MODEL, tokens, 0, torch.float64) for tokens in (TOKENS, changed))
    assert torch.equal(one[:20], two[:20])
    assert (one[20:] - two[20:]).norm(dim=1).min() > 0.01 * one.norm(dim=1).max()


def test_rows_from_a_position_on_are_those_of_the_whole():
    whole = dense_logits(MODEL, TOKENS, 0, torch.float64)
    torch.testing.assert_close(dense_logits(MODEL, TOKENS, 33, torch.float64), whole[33:])


def test_the_model_hands_attention_rotated_queries_and_writes_keys_and_values_first():
    """With an attention that answers 0, the first layer's cache and queries are plain functions of the embedding."""
    config = TINY.cascade_config(EngineConfig(num_pages=8, page_size=8))
    cache = MODEL.make_cache(config)
    seen = []

    def attend(q, kv):
        seen.append((q, kv.clone()))
        return torch.zeros_like(q)

    token, position = torch.tensor(TOKENS[:3]), torch.tensor([0, 9, 9])
    slot = torch.tensor([5 * 8 + 2, 1 * 8 + 1, 1 * 8 + 2])
    out = MODEL.hidden(token, position, slot, cache, attend)
    assert out.shape == (3, TINY.hidden_size)
    (q, kv), _ = seen
    x = MODEL.embedding[token].double()
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    wanted = (x @ MODEL.layers[0].qkv.double().T).view(3, -1, 64)
    for row, (page, place) in enumerate([(5, 2), (1, 1), (1, 2)]):
        angles = float(position[row]) * TINY.rope_theta ** (-torch.arange(32, dtype=torch.float64) / 32)
        first, second = wanted[row, :6].chunk(2, -1)
        turned = torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )
        for got, expected in (
            (q[row], turned[:4]),
            (kv[page, 0, place], turned[4:]),
            (kv[page, 1, place], wanted[row, 6:]),
        ):
            assert float((got.double() - expected).norm() / expected.norm()) < 2 * torch.finfo(torch.bfloat16).eps
    assert (kv.flatten(2).norm(dim=2) > 0).sum() == 2 * 2  # K and V of two pages


def test_attention_logits_spread_as_the_gain_says():
    """So that a single token or page of many can matter."""
    x = torch.randn(500, TINY.hidden_size, dtype=torch.bfloat16)
    q, k, _ = (x @ MODEL.layers[0].qkv.T).float().view(500, -1, 64).split([4, 2, 2], 1)
    logits = torch.einsum("qd,kd->qk", q[:, 0], k[:, 0]) / math.sqrt(64)
    assert float(logits.std()) == pytest.approx(QUERY_GAIN, rel=0.15)


def test_llama_8b_has_its_widths():
    config = LLAMA_8B.cascade_config(EngineConfig(num_pages=100))
    assert (config.num_qo_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size, config.dtype) == (4096, 14336, "bfloat16")
    assert config.max_kv_pages == 101
