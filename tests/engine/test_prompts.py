"""Requests: equal ids become equal tokens, and lengths are those that were asked for."""

import pytest

from flashinfer_cascade import InvalidBatchError
from flashinfer_cascade.bench.traces import BLOCK_TOKENS, CONVERSATION, read_mooncake
from flashinfer_cascade.engine.prompts import TOOL_OWN, TOOL_ROOTS, sampled_prompts, tool_calls, trace_prompts


def test_sampled_prompts():
    requests = sampled_prompts(3, 4, 20, 7, 100)
    assert [(r.id, len(r.prompt), r.max_new_tokens, r.num_samples) for r in requests] == [
        (i, 20, 7, 4) for i in range(3)
    ]
    assert len({tuple(r.prompt) for r in requests}) == 3
    assert all(0 <= token < 100 for r in requests for token in r.prompt)
    assert requests == sampled_prompts(3, 4, 20, 7, 100)
    assert requests != sampled_prompts(3, 4, 20, 7, 100, seed=1)


@pytest.mark.parametrize("shrink", [1, 16])
def test_tool_calls(shrink):
    requests = tool_calls(9, 5, 1000, shrink=shrink)
    roots = {tuple(requests[at].prompt[: length // shrink]) for at, length in ((0, TOOL_ROOTS[0]), (-1, TOOL_ROOTS[1]))}
    assert len(roots) == 2
    for number, request in enumerate(requests):
        length = TOOL_ROOTS[number >= 6] // shrink
        assert tuple(request.prompt[:length]) in roots
        assert TOOL_OWN[0] // shrink <= len(request.prompt) - length <= TOOL_OWN[1] // shrink
    assert len({tuple(r.prompt) for r in requests}) == 9


@pytest.mark.parametrize("shrink", [1, 16])
def test_a_trace_shares_what_its_ids_share(shrink):
    requests = trace_prompts(CONVERSATION, 12, 5, 1000, shrink=shrink)
    block = BLOCK_TOKENS // shrink
    of_id = {}
    for request, prompt in zip(requests, read_mooncake(CONVERSATION), strict=False):
        assert len(request.prompt) == prompt.input_length // shrink
        for number, id in enumerate(prompt.hash_ids[:-1]):
            tokens = tuple(request.prompt[number * block : (number + 1) * block])
            assert of_id.setdefault(id, tokens) == tokens
    assert len(set(of_id.values())) == len(of_id) > 100


def test_prompts_of_a_trace_are_cut():
    whole, cut = (trace_prompts(CONVERSATION, 3, 5, 1000, max_prompt=most) for most in (None, 700))
    assert [r.prompt for r in cut] == [r.prompt[:700] for r in whole]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sampled_prompts(0, 1, 1, 1, 9), "prompts=0 must be at least 1"),
        (lambda: tool_calls(1, 0, 9), "output=0 must be at least 1"),
        (lambda: trace_prompts(CONVERSATION, 1, 1, 9, max_prompt=0), "max_prompt=0 must be at least 1"),
    ],
)
def test_numbers_below_one_are_refused(make, message):
    with pytest.raises(InvalidBatchError, match=message):
        make()
