"""The serving loop on a tiny model: logits within the error of its dtype, whatever pages, chunks and batches do."""

import numpy as np
import pytest
import torch

from flashinfer_cascade import CascadePlanner, PlannerPolicy
from flashinfer_cascade.engine.account import RunStats
from flashinfer_cascade.engine.compare import Agreement, check_logits, compare, row_errors
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.engine import Engine
from flashinfer_cascade.engine.model import TINY, Llama, dense_logits
from flashinfer_cascade.engine.requests import Request
from flashinfer_cascade.report import summary

LEVELS = PlannerPolicy(executor="levels", fold=False)
MODEL = Llama(TINY, 128)
RNG = np.random.default_rng(0)
ROOT = RNG.integers(TINY.vocab_size, size=35).tolist()
# Samples of a prompt that ends within a page, two requests behind the same root, one of its own.
REQUESTS = [
    Request(0, ROOT[:30], 9, num_samples=3),
    Request(1, ROOT + RNG.integers(TINY.vocab_size, size=20).tolist(), 6),
    Request(2, ROOT + RNG.integers(TINY.vocab_size, size=7).tolist(), 12),
    Request(3, RNG.integers(TINY.vocab_size, size=50).tolist(), 4),
]


def engine_of(num_pages=150, max_num_tokens=48, page_size=4, model=MODEL):
    sizes = {"num_pages": num_pages, "page_size": page_size, "max_num_tokens": max_num_tokens}
    return Engine(model, EngineConfig(max_batch_size=6, max_seq_len=128, **sizes))


class Served:
    """A run, with the logits behind every generated token, and what was left of its pages."""

    def __init__(self, engine, policy=None, requests=REQUESTS, forced=None):
        self.rows, self.scheduler = {}, None
        self.requests = {request.id: request for request in requests}
        self.result = engine.run(requests, policy, forced=forced, on_logits=self.keep, on_step=self.watch)

    def keep(self, sampled):
        receiving = [rows for rows in sampled.batch.rows if rows.receivers]
        for rows, logits in zip(receiving, sampled.logits, strict=True):
            for sequence in rows.receivers:
                assert (sequence.id, rows.end) not in self.rows
                self.rows[sequence.id, rows.end] = logits

    def watch(self, stats, scheduler):
        self.scheduler = scheduler

    def logits(self, id):
        first = len(self.requests[id.request].prompt)
        return torch.stack([self.rows[id, first + number] for number in range(len(self.result.outputs[id]))])

    def tokens(self, id):
        return self.requests[id.request].prompt + self.result.outputs[id]


def dense_errors(served, dtype=None):
    """Largest error of each sequence against the dense model in float64; with a dtype, that of this model in it."""
    errors = {}
    for id in served.result.outputs:
        tokens, first = served.tokens(id)[:-1], len(served.requests[id.request].prompt) - 1
        exact = dense_logits(MODEL, tokens, first, torch.float64)
        rows = served.logits(id) if dtype is None else dense_logits(MODEL, tokens, first, dtype)
        errors[id] = float(row_errors(rows, exact).amax())
    return errors


@pytest.fixture(scope="module", name="flat")
def flat_fixture():
    return Served(engine_of(), PlannerPolicy(executor="flat"))


@pytest.fixture(scope="module", name="budget")
def budget_fixture(flat):
    """Twice the error of the dense model when it computes in bfloat16."""
    return 2 * max(dense_errors(flat, torch.bfloat16).values())


def test_every_sample_is_what_a_dense_model_says(flat, budget):
    errors = dense_errors(flat)
    assert len(errors) == 6
    assert max(errors.values()) <= budget
    assert flat.result.scheduling.copied_pages == 2
    assert flat.result.scheduling.cached_tokens > 0
    for id, tokens in flat.result.outputs.items():
        logits = flat.logits(id)
        likely = logits.topk(id.sample + 1).values  # by value: in bfloat16 several tokens may be equally likely
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert chosen.tolist() == [float(likely[0, id.sample]), *likely[1:, 0].tolist()]


def test_samples_differ_from_their_first_token_on(flat):
    firsts = [tokens[0] for id, tokens in flat.result.outputs.items() if id.request == 0]
    assert len(set(firsts)) == 3


@pytest.mark.parametrize(("max_num_tokens", "page_size"), [(300, 4), (7, 4), (48, 1), (48, 64)])
def test_chunks_and_pages_change_nothing(max_num_tokens, page_size, flat, budget):
    served = Served(engine_of(150 * 4, max_num_tokens, page_size), LEVELS, forced=flat.result.outputs)
    assert max(dense_errors(served).values()) <= budget
    assert served.result.stats.new_tokens == flat.result.stats.new_tokens
    if max_num_tokens == 7:
        assert served.result.stats.num_steps > flat.result.stats.num_steps + 10


def test_preempted_sequences_go_on_as_if_nothing_had_been(flat, budget):
    served = Served(engine_of(num_pages=17), LEVELS, forced=flat.result.outputs)
    assert served.result.scheduling.preemptions > 0
    assert served.result.scheduling.max_held_pages <= 17
    assert served.result.outputs == flat.result.outputs
    assert max(dense_errors(served).values()) <= budget


@pytest.mark.parametrize("num_pages", [17, 150])
def test_nothing_leaks(num_pages):
    served = Served(engine_of(num_pages))
    allocator, scheduler = served.scheduler.allocator, served.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, len(scheduler.session)) == (0, 0, 0)
    assert allocator.num_available == num_pages
    assert not any(map(allocator.count, range(num_pages)))
    assert allocator.num_cached > 0


def test_an_engine_runs_again_from_an_empty_cache():
    engine = engine_of()
    first, second = (Served(engine, LEVELS) for _ in range(2))
    assert first.result.outputs == second.result.outputs
    assert first.result.scheduling.cached_tokens == second.result.scheduling.cached_tokens
    assert first.rows.keys() == second.rows.keys()
    assert all(torch.equal(logits, second.rows[key]) for key, logits in first.rows.items())


def test_decodes_go_through_the_pool_and_prompts_do_not():
    engine = engine_of()
    stats = engine.run(REQUESTS, LEVELS).stats
    assert 0 < stats.num_decode_steps < stats.num_steps
    assert stats.graph_replays == stats.num_decode_steps
    assert stats.eager.total() == stats.num_steps - stats.num_decode_steps
    assert {batch for _, batch in stats.executors} == {"flat", "levels"}
    assert len(stats.plan_us) == stats.num_steps
    assert stats.new_tokens == sum(r.max_new_tokens * r.num_samples for r in REQUESTS)


def test_cascades_agree_with_flat_and_read_less():
    comparison = compare(engine_of(), REQUESTS, LEVELS, repeats=2)
    found = comparison.agreement
    assert found.ok
    # The first token of all samples comes from one row.
    assert found.num_rows == sum(r.max_new_tokens * r.num_samples - (r.num_samples - 1) for r in REQUESTS)
    assert 0 < found.max_error <= found.bound == 3 * found.flat_error
    (flat, _), (cascade, _) = comparison.flat, comparison.cascade
    assert flat.stats.read_tokens == flat.stats.flat_tokens == cascade.stats.flat_tokens
    assert cascade.stats.read_tokens < 0.8 * flat.stats.read_tokens
    assert comparison.record()["agreement"]["ok"]
    assert comparison.gain("tokens_per_s") > 0


@pytest.mark.parametrize("wrong", ["pages", "last page", "nan"])
def test_wrong_cascades_are_noticed(wrong, monkeypatch):
    engine = engine_of()
    real = engine.runtime.run
    runs = []

    def run(q, cache):
        out = real(q, cache)
        if len(runs) and wrong == "pages":
            out = real(q, cache.roll(1, 0))
        elif len(runs) and wrong == "last page":  # values of one page of many
            changed = cache.clone()
            changed[5, 1] = 0
            out = real(q, changed)
        elif len(runs):
            out[-1] = float("nan")
        return out

    monkeypatch.setattr(engine.runtime, "run", run)
    real_run = engine.run

    def counted(*arguments, **options):
        if options.get("forced") is not None:
            runs.append(1)
        return real_run(*arguments, **options)

    monkeypatch.setattr(engine, "run", counted)
    assert not check_logits(engine, REQUESTS, LEVELS).ok


@pytest.mark.parametrize(
    ("errors", "ok"),
    [((0.03, 0.01, 0.02), True), ((0.031, 0.01, 0.02), False), ((0.03, 0.01, 0.021), False), ((0.01, 0.0, 0.0), False)],
)
def test_both_errors_are_bounded(errors, ok):
    apart, flat, cascade = errors
    found = Agreement(10, apart, 3 * flat, flat, cascade, 1.0)
    assert found.ok == ok


def test_what_is_counted_is_what_plans_say():
    planner = CascadePlanner(MODEL.shape.cascade_config(EngineConfig(num_pages=100)), LEVELS)
    plans = [planner.plan([[0, 1, 2], [0, 1, 3], [4]], [40, 48, 5]), planner.plan([[7], [8, 9]], [9, 32], [9, 1])]
    stats = RunStats(token_bytes=planner.config.kv_token_bytes)
    for plan, lens in zip(plans, ([40, 48, 5], [9, 32]), strict=True):
        stats.planned(plan, sum(lens), 10.0)
    record = stats.record()
    for name in ("kv_read_bytes", "kv_flat_bytes"):
        assert record[name] == sum(summary(plan)[name] for plan in plans)
    assert record["executors"] == {"decode: flat": 1, "decode: levels": 1}
    assert (record["steps"], record["rows"], record["plan_us"]["median"]) == (2, 13, 10.0)
