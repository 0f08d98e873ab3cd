"""Requests to serve: samples of random prompts, calls that share tools' descriptions, and recorded traces."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np

from flashinfer_cascade.bench.traces import BLOCK_TOKENS, read_mooncake
from flashinfer_cascade.engine.requests import Request
from flashinfer_cascade.errors import InvalidBatchError

TOOL_ROOTS = (6144, 2560)
"""Tokens of two system prompts with descriptions of tools."""

TOOL_OWN = (300, 1200)
"""Tokens that each call adds to its root, from and to. Source: the workload "tool" of `bench.workloads`."""


def sampled_prompts(
    num_prompts: int, num_samples: int, prompt_len: int, max_new_tokens: int, vocab_size: int, *, seed: int = 0
) -> list[Request]:
    """Random prompts of one length, each continued several times.

    Raises:
        InvalidBatchError: a number is below 1.
    """
    _check(prompts=num_prompts, samples=num_samples, prompt=prompt_len, output=max_new_tokens)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(vocab_size, size=(num_prompts, prompt_len)).tolist()
    return [Request(id, prompt, max_new_tokens, num_samples) for id, prompt in enumerate(prompts)]


def tool_calls(
    num_requests: int, max_new_tokens: int, vocab_size: int, *, shrink: int = 1, seed: int = 0
) -> list[Request]:
    """Two thirds of the requests begin with the longer of two roots, one third with the other; the rest is their own.

    Args:
        num_requests: in all.
        max_new_tokens: for each.
        vocab_size: tokens are drawn from.
        shrink: divide all lengths by this.
        seed: draws tokens and lengths.

    Raises:
        InvalidBatchError: a number is below 1.
    """
    _check(tools=num_requests, output=max_new_tokens, shrink=shrink)
    rng = np.random.default_rng(seed)
    roots = [rng.integers(vocab_size, size=length // shrink).tolist() for length in TOOL_ROOTS]
    requests = []
    for id in range(num_requests):
        own = rng.integers(vocab_size, size=int(rng.integers(*TOOL_OWN)) // shrink).tolist()
        requests.append(Request(id, roots[3 * id >= 2 * num_requests] + own, max_new_tokens))
    return requests


def trace_prompts(
    path: Path,
    num_requests: int,
    max_new_tokens: int,
    vocab_size: int,
    *,
    shrink: int = 1,
    max_prompt: int | None = None,
    seed: int = 0,
) -> list[Request]:
    """The first prompts of a trace in Mooncake's form: equal ids of blocks become equal tokens.

    Args:
        path: the trace.
        num_requests: how many; fewer where the trace ends.
        max_new_tokens: for each.
        vocab_size: tokens are drawn from.
        shrink: divide all lengths by this: a block is `BLOCK_TOKENS` / shrink tokens.
        max_prompt: cut prompts to their first so many tokens; None leaves them.
        seed: draws each block's tokens, together with its id.

    Raises:
        InvalidBatchError: the file is malformed, or a number is below 1.
    """
    _check(requests=num_requests, output=max_new_tokens, shrink=shrink, max_prompt=max_prompt)
    block_tokens = BLOCK_TOKENS // shrink
    requests = []
    for id, prompt in enumerate(islice(read_mooncake(path), num_requests)):
        tokens: list[int] = []
        for block in prompt.hash_ids:
            tokens += np.random.default_rng([seed, block]).integers(vocab_size, size=block_tokens).tolist()
        length = max(1, prompt.input_length // shrink)
        requests.append(Request(id, tokens[: min(length, max_prompt or length)], max_new_tokens))
    return requests


def _check(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidBatchError(f"{name}={value} must be at least 1")
