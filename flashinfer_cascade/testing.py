"""What tests of attention need: KV caches, batches that share prefixes, an fp64 oracle, an error budget.

Of the package this imports the configuration alone, so that the oracle shares no code with what it judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from flashinfer_cascade.config import CascadeConfig

KVCache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD), ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND),
or K and V as a pair of these without their second dimension."""


class RandomBatch(NamedTuple):
    """One step's input, as an engine would give it.

    Attributes:
        block_tables: page ids of each request; may be longer than its seq_len needs.
        seq_lens: KV tokens of each request with this step's new ones; 0 marks a padding request.
        qo_lens: query rows of each request.
    """

    block_tables: list[list[int]]
    seq_lens: list[int]
    qo_lens: list[int]

    @property
    def num_pages(self) -> int:
        """Pages that a KV cache needs to hold all ids."""
        return 1 + max((page for table in self.block_tables for page in table), default=0)

    @property
    def num_rows(self) -> int:
        """Query tokens in the batch."""
        return sum(self.qo_lens)

    def permuted(self, order: Sequence[int]) -> RandomBatch:
        """The same requests, the one at ``order[i]`` in place i."""
        tables, seq_lens, qo_lens = self
        return RandomBatch([tables[r] for r in order], [seq_lens[r] for r in order], [qo_lens[r] for r in order])

    def rows_of(self, order: Sequence[int]) -> list[int]:
        """Where each row of ``permuted(order)`` lies in this batch."""
        starts = np.cumsum([0, *self.qo_lens])
        return [row for r in order for row in range(starts[r], starts[r + 1])]


def random_batch(
    rng: np.random.Generator, *, page_size: int, num_requests: int = 8, max_len: int = 0, max_new: int = 1
) -> RandomBatch:
    """Grow random prefix trees: forks of earlier requests, new roots, identical requests, padding.

    Prefixes end anywhere, so forks copy a page that is shared in part. Lengths of one token and around one page are
    frequent; some tables hold a page twice, or pages beyond their length. New tokens never lie in a page that another
    request shares in full, except in identical requests.

    Args:
        rng: decides everything.
        page_size: tokens a page holds.
        num_requests: requests, padding included.
        max_len: most tokens that a request adds to the prefix it shares; 0 is five pages.
        max_new: most query rows of a request; half of the requests have one.
    """
    borders = [length for length in (1, page_size - 1, page_size, page_size + 1) if length > 0]
    max_len = max_len or 5 * page_size
    batch = tables, seq_lens, qo_lens = RandomBatch([], [], [])
    used = 0
    for number in range(num_requests):
        kind = rng.choice(["fork", "root", "repeat", "identical", "padding"], p=[0.55, 0.15, 0.1, 0.1, 0.1])
        new = 1 if rng.random() < 0.5 else int(rng.integers(1, max_new + 1))
        parent = int(rng.integers(number)) if number else -1
        prefix: list[int] = []
        if kind == "padding":
            table, seq_len = [], 0
        elif kind == "identical" and parent >= 0:
            table, seq_len, new = tables[parent], seq_lens[parent], qo_lens[parent]
        else:
            if kind in ("fork", "repeat") and parent >= 0:
                computed = max(seq_lens[parent] - qo_lens[parent], 0)
                shared = computed if rng.random() < 0.5 else int(rng.integers(computed + 1))
                prefix = tables[parent][: shared // page_size]
            added = int(rng.choice(borders) if rng.random() < 0.5 else rng.integers(1, max_len + 1))
            seq_len = len(prefix) * page_size + added
            new = min(new, added)
            num_own = -(-added // page_size) + int(rng.random() < 0.2)
            table = prefix + list(range(used, used + num_own))
            used += num_own
            full = (seq_len - new) // page_size
            if kind == "repeat" and full > len(prefix):
                table[rng.integers(len(prefix), full)] = table[rng.integers(full)]
        tables.append(table)
        seq_lens.append(seq_len)
        qo_lens.append(new)
    ids = rng.permutation(used + 3).tolist()  # so that neighbours in a table are none in the cache
    return batch._replace(block_tables=[[ids[page] for page in table] for table in tables])


def make_q(config: CascadeConfig, num_rows: int, *, seed: int = 0, device: str | torch.device = "cpu") -> torch.Tensor:
    """Normal queries: ``[num_rows, num_qo_heads, head_dim]``, config.dtype; equal on all devices for one seed."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, config.num_qo_heads, config.head_dim, generator=generator)
    return q.to(device, getattr(torch, config.dtype))


def make_kv_cache(
    config: CascadeConfig,
    num_pages: int,
    *,
    form: Literal["tensor", "pair", "permuted"] = "tensor",
    seed: int = 0,
    device: str | torch.device = "cpu",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> KVCache:
    """Normal keys and values in every slot, also those that no request fills.

    Args:
        config: shape, dtype and layout.
        num_pages: pages.
        form: "tensor" is one contiguous 5-D tensor; "pair" K and V, two strided views of one; "permuted" a 5-D view
            whose memory has the other layout's order, as engines make it.
        seed: equal on all devices, and in all forms but "permuted".
        device: where to.
        k_scale: what the attention call will multiply keys by; they are divided by it before the cast.
        v_scale: likewise for values.
    """
    token_head = [config.page_size, config.num_kv_heads]
    if (config.kv_layout == "HND") != (form == "permuted"):
        token_head.reverse()
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(num_pages, 2, *token_head, config.head_dim, generator=generator)
    cache /= torch.tensor([k_scale, v_scale]).view(2, 1, 1, 1)
    cache = cache.to(getattr(torch, config.kv_dtype)).to(device)
    if form == "permuted":
        return cache.transpose(2, 3)
    return cache if form == "tensor" else (cache[:, 0], cache[:, 1])


def dense_attention(
    config: CascadeConfig,
    q: torch.Tensor,
    kv_cache: KVCache,
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    qo_lens: Sequence[int],
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: attention request by request, straight from the block tables, all in float64.

    Row i of a request stands at position ``seq_len - qo_len + i`` and sees tokens up to its own. Rows of padding
    requests see nothing.

    Args:
        config: the attention.
        q: ``[sum(qo_lens), num_qo_heads, head_dim]``, the requests' rows one after the other.
        kv_cache: see `KVCache`; any strides.
        block_tables: page ids of each request.
        seq_lens: KV tokens of each request with its new ones; 0 marks a padding request.
        qo_lens: query rows of each request.
        k_scale: what the cache's keys are multiplied by.
        v_scale: what its values are multiplied by.
        sinks: ``[num_qo_heads]``, natural-log logits that join the denominator.

    Returns:
        out: float64, shape of q.
        lse: float64[rows, num_qo_heads], log2 of the sum of exp of all logits, sinks included; -inf for no logit.
    """
    requests = zip(block_tables, seq_lens, qo_lens, strict=True)
    return _dense(config, q, kv_cache, requests, k_scale, v_scale, sinks, torch.float64, torch.float64)


def plain_attention(
    config: CascadeConfig,
    q: torch.Tensor,
    kv_cache: KVCache,
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    qo_lens: Sequence[int],
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What one ordinary low-precision kernel computes; arguments and shape are those of `dense_attention`.

    Sums are float32; the weights, before division by their sum, and the result are rounded to config.dtype.
    """
    requests, dtype = zip(block_tables, seq_lens, qo_lens, strict=True), getattr(torch, config.dtype)
    return _dense(config, q, kv_cache, requests, k_scale, v_scale, sinks, torch.float32, dtype)[0].to(dtype)


def _dense(
    config: CascadeConfig,
    q: torch.Tensor,
    kv_cache: KVCache,
    requests: Iterable[tuple[Sequence[int], int, int]],
    k_scale: float,
    v_scale: float,
    sinks: torch.Tensor | None,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute in `dtype`, with weights and result rounded to `rounded`."""
    k_cache, v_cache = kv_cache.unbind(1) if isinstance(kv_cache, torch.Tensor) else kv_cache
    if config.kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    num_heads, group, cap, left = config.num_qo_heads, config.group_size, config.logits_soft_cap, config.window_left
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
    if sinks is not None:
        sinks = sinks.to(dtype)
        lse[:] = sinks / math.log(2)
    end = 0
    for table, seq_len, qo_len in requests:
        begin, end = end, end + qo_len
        if seq_len == 0:
            continue
        tokens = torch.arange(seq_len, device=q.device)
        pages = torch.tensor(list(table), device=q.device)[tokens // config.page_size]
        k, v = (cache[pages, tokens % config.page_size].to(dtype) for cache in (k_cache, v_cache))
        rows = q[begin:end].to(dtype).unflatten(1, (-1, group))
        logits = torch.einsum("rkgd,tkd->kgrt", rows, k).flatten(0, 1) * (config.softmax_scale * k_scale)
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        age = torch.arange(seq_len - qo_len, seq_len, device=q.device)[:, None] - tokens
        logits[:, (age < 0) | (age > (left if left >= 0 else seq_len))] = -math.inf
        if sinks is not None:  # one token more, which has no value
            logits = torch.cat((logits, sinks[:, None, None].expand(num_heads, qo_len, 1)), -1)
        top = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - top)
        total = weights.sum(-1)
        by_group = weights[..., :seq_len].to(rounded).to(dtype).unflatten(0, (-1, group))
        result = torch.einsum("kgrt,tkd->rkgd", by_group, v).flatten(1, 2)
        out[begin:end] = (result * v_scale / total.T[..., None]).to(rounded)
        lse[begin:end] = (top[..., 0] + torch.log(total)).T / math.log(2)
    return out, lse


def relative_errors(out: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """L2 error over L2 norm: float64[rows, heads]; inf for NaN, or where the oracle is 0 and `out` is not."""
    expected = oracle.double()
    difference = (out.to(expected) - expected).norm(dim=-1)
    error = torch.where(difference == 0, 0.0, difference / expected.norm(dim=-1))
    return torch.nan_to_num(error, nan=math.inf, posinf=math.inf)


def error_budget(oracle: torch.Tensor, plain: torch.Tensor, factor: float = 2.0) -> float:
    """What the largest relative L2 error over rows and heads may be: `factor` times that of plain attention.

    Plain attention can be exact (of one token, say), so its error counts as no less than a quarter of the dtype's
    eps: what rounding every element of a result once costs, in the mean square.
    """
    floor = torch.finfo(plain.dtype).eps / 4
    return factor * max(float(relative_errors(plain, oracle).amax()), floor)


def assert_close(out: torch.Tensor, oracle: torch.Tensor, plain: torch.Tensor, factor: float = 2.0) -> None:
    """Require the largest relative L2 error over rows and heads to be within `error_budget`.

    Rows that see nothing must be exactly 0.

    Args:
        out: ``[rows, heads, head_dim]``, what is judged.
        oracle: float64, the `dense_attention` of the same input.
        plain: its `plain_attention`.
        factor: how many times less exact than `plain` it may be: the parts of a cascade are rounded once more.
    """
    if out.shape != oracle.shape:
        raise AssertionError(f"out has shape {tuple(out.shape)}, the oracle {tuple(oracle.shape)}")
    budget = error_budget(oracle, plain, factor)
    errors = relative_errors(out, oracle)
    worst = int(errors.argmax())
    row, head = divmod(worst, errors.shape[1])
    if errors[row, head] > budget:
        raise AssertionError(
            f"row {row}, head {head}: relative L2 error {errors[row, head]:.3g} exceeds {budget:.3g}, {factor:g} times "
            f"that of plain {plain.dtype} attention, as do {int((errors > budget).sum())} of {errors.numel()} (row, "
            f"head) pairs.\n  out:    {out[row, head, :6].tolist()}\n"
            f"  oracle: {oracle[row, head, :6].tolist()}"
        )


def assert_lse_close(lse: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype, atol: float = 1e-3) -> None:
    """Require a base-2 log-sum-exp to lie near the oracle's, and to be -inf exactly where that is.

    Args:
        lse: float32[rows, heads].
        oracle: float64, the `dense_attention` of the same input.
        dtype: of q. FlashInfer's tensor-core kernels sum weights after rounding them to it, each by up to half its
            eps; the logarithm of the sum may be off by as much.
        atol: what is allowed beside that: float32 sums and the GPU's approximate exp2 and log2.
    """
    atol += math.log2(1 + torch.finfo(dtype).eps / 2)
    if lse.shape != oracle.shape:
        raise AssertionError(f"lse has shape {tuple(lse.shape)}, the oracle {tuple(oracle.shape)}")
    got = lse.to(oracle)
    error = torch.where(got == oracle, 0.0, (got - oracle).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    row, head = divmod(int(error.argmax()), error.shape[1])
    if error[row, head] > atol:
        raise AssertionError(
            f"row {row}, head {head}: lse {got[row, head]:.6f}, oracle {oracle[row, head]:.6f}, "
            f"off by more than {atol:g} as are {int((error > atol).sum())} of {error.numel()} (row, head) pairs"
        )
