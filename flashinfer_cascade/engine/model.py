"""A Llama-style decoder in plain torch, with random weights and its KV in pages; and what it must compute, densely."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.nn.functional import embedding, linear, rms_norm, silu

from flashinfer_cascade.config import CascadeConfig
from flashinfer_cascade.engine.config import EngineConfig

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one layer, from q and the layer's KV cache: `CascadeRuntime.run`."""

QUERY_GAIN = 2.0
"""Standard deviation of attention logits. With 1, attention over long contexts is close to a mean over all values, and
a page that is missing or wrong would hardly be seen in the results."""

MAX_SCORES = 2**28
"""Attention logits that the dense model holds at once."""


class ModelShape(BaseModel):
    """Sizes of a decoder.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_qo_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    rope_theta: float = Field(default=500000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    dtype: str = "bfloat16"

    def cascade_config(self, engine: EngineConfig) -> CascadeConfig:
        """The attention of its layers, in an engine of these sizes. One more page takes what padding rows write."""
        return CascadeConfig(
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=engine.page_size,
            dtype=self.dtype,
            max_batch_size=engine.max_batch_size,
            max_num_rows=engine.max_num_tokens,
            max_kv_pages=engine.num_pages + 1,
            max_kv_indices=engine.max_batch_size * -(-engine.max_seq_len // engine.page_size),
        )


TINY = ModelShape(
    num_layers=2,
    hidden_size=256,
    intermediate_size=512,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1024,
)
"""For the CPU."""

LLAMA_8B = ModelShape(
    num_layers=8,
    hidden_size=4096,
    intermediate_size=14336,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
)
"""Llama-3-8B's widths with a quarter of its layers and of its vocabulary."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer, ``[out, in]``: q, k and v in one; then the MLP's gate and up in one."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Args:
        shape: its sizes.
        max_seq_len: positions.
        device: where.
        seed: of the weights.
    """

    def __init__(
        self, shape: ModelShape, max_seq_len: int, device: str | torch.device = "cpu", *, seed: int = 0
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        generator = torch.Generator(self.device).manual_seed(seed)
        dtype = getattr(torch, shape.dtype)

        def weight(rows: int, columns: int, std: float | None = None) -> torch.Tensor:
            made = torch.randn(rows, columns, generator=generator, device=self.device, dtype=dtype)
            return made.mul_(columns**-0.5 if std is None else std)

        hidden, dim = shape.hidden_size, shape.head_dim
        self.layers = []
        for _ in range(shape.num_layers):
            qkv = weight((shape.num_qo_heads + 2 * shape.num_kv_heads) * dim, hidden)
            qkv[: shape.num_qo_heads * dim] *= QUERY_GAIN
            self.layers.append(
                Layer(
                    qkv,
                    weight(hidden, shape.num_qo_heads * dim),
                    weight(2 * shape.intermediate_size, hidden),
                    weight(hidden, shape.intermediate_size),
                )
            )
        self.embedding = weight(shape.vocab_size, hidden, std=1.0)
        self.head = weight(shape.vocab_size, hidden)
        frequencies = shape.rope_theta ** -(torch.arange(0, dim, 2, device=self.device, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_seq_len, device=self.device, dtype=torch.float64), frequencies)
        self.cos_sin = torch.stack((angles.cos(), angles.sin()), 1).float()

    def make_cache(self, config: CascadeConfig) -> torch.Tensor:
        """KV of all layers: ``[num_layers, max_kv_pages, 2, page_size, num_kv_heads, head_dim]``, zeros."""
        shape = (self.shape.num_layers, config.max_kv_pages, 2, *config.page_shape)
        return torch.zeros(shape, dtype=getattr(torch, self.shape.dtype), device=self.device)

    def hidden(
        self, token: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, cache: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Run the layers for some rows; their KV is written before it is attended to.

        Args:
            token: int64[num_rows].
            position: int64[num_rows], in its sequence.
            slot: int64[num_rows], page times page_size plus place in the page.
            cache: see `make_cache`.
            attend: attention of one layer.

        Returns:
            ``[num_rows, hidden_size]``, for `logits`.
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
        page_size = cache.shape[3]
        page, place = slot // page_size, slot % page_size
        cos, sin = self.cos_sin[position][:, :, None].unbind(1)
        x = embedding(token, self.embedding)
        for layer, kv in zip(self.layers, cache, strict=True):
            qkv = linear(self._norm(x), layer.qkv).view(-1, heads + 2 * kv_heads, dim)
            first, second = qkv[:, : heads + kv_heads].float().chunk(2, -1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
            kv[page, :, place] = torch.stack((rotated[:, heads:], qkv[:, heads + kv_heads :]), 1)
            attended = attend(rotated[:, :heads].contiguous(), kv)
            x = x + linear(attended.flatten(1), layer.out)
            gate, up = linear(self._norm(x), layer.gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_rows, vocab_size]`` for what `hidden` returned."""
        return linear(self._norm(hidden), self.head)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], eps=self.shape.rms_norm_eps)


@torch.inference_mode()
def dense_logits(model: Llama, tokens: list[int], first: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a model must say: one sequence at once, without a cache, pages or batches.

    Args:
        model: its weights alone are used.
        tokens: of the sequence.
        first: the first position wanted.
        dtype: of all arithmetic, but that positions and rotations have float32 at least.

    Returns:
        ``[len(tokens) - first, vocab_size]``.
    """
    shape, device = model.shape, model.device
    heads, kv_heads, dim = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    at = torch.arange(len(tokens), device=device)
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = torch.exp(-math.log(shape.rope_theta) * torch.arange(dim // 2, device=device, dtype=wide) * 2 / dim)
    turn = torch.polar(torch.ones((), device=device, dtype=wide), at[:, None] * frequencies)[:, None]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        # The two halves of a head are real and imaginary parts.
        turned = torch.complex(*x.to(wide).chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1).to(dtype)

    x = model.embedding[torch.tensor(tokens, device=device)].to(dtype)
    for layer in model.layers:
        q, k, v = (norm(x) @ layer.qkv.to(dtype).T).split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
        q, k, v = (part.view(len(tokens), -1, dim) for part in (q, k, v))
        k, v = (part.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for part in (rotate(k), v))
        q = rotate(q).transpose(0, 1)
        attended = []
        for some in at.split(max(1, MAX_SCORES // (heads * len(tokens)))):
            scores = q[:, some] @ k.transpose(1, 2) * dim**-0.5
            attended.append(scores.masked_fill_(at > some[:, None], -math.inf).softmax(-1) @ v)
        x = x + torch.cat(attended, 1).transpose(0, 1).flatten(1) @ layer.out.to(dtype).T
        gate, up = (norm(x) @ layer.gate_up.to(dtype).T).chunk(2, 1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer.down.to(dtype).T
    return norm(x[first:]) @ model.head.to(dtype).T
