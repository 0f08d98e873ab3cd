"""What to serve: options, the requests that they ask for, and sets of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashinfer_cascade.bench.traces import CONVERSATION, SYNTHETIC
from flashinfer_cascade.engine.prompts import sampled_prompts, tool_calls, trace_prompts
from flashinfer_cascade.engine.requests import Request

TRACES = {"conversation": CONVERSATION, "synthetic": SYNTHETIC}


class ServeOptions(BaseModel):
    """What to serve, and on what.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    samples: str | None = Field(
        default=None, pattern=r"^[1-9]\d*x[1-9]\d*$", description="random prompts times samples of each, as in 8x8"
    )
    prompt: int = Field(default=4096, ge=1, description="tokens of each of these prompts")
    tools: int | None = Field(
        default=None, ge=1, description="requests behind two tool descriptions, of 6144 and 2560 tokens"
    )
    trace: str | None = Field(default=None, description="conversation, synthetic, or a trace in Mooncake's form")
    requests: int = Field(default=64, ge=1, description="prompts of the trace")
    max_prompt: int | None = Field(default=None, ge=1, description="cut the trace's prompts to so many tokens")
    shrink: int = Field(default=1, ge=1, le=64, description="divide all lengths of tools and trace by this")
    output: int = Field(default=128, ge=1, description="tokens to generate for each sequence")
    model: Literal["auto", "tiny", "8b"] = Field(
        default="auto", description="Llama-3-8B's widths, or tiny; auto is tiny on the CPU"
    )
    layers: int | None = Field(default=None, ge=1, description="of the model; 2 if tiny, 8 otherwise")
    device: str | None = Field(default=None, description="cuda where there is one, or cpu")
    page_size: int = Field(default=16, ge=1, description="tokens a KV page holds")
    pages: int | None = Field(default=None, ge=1, description="of the KV cache; as many as could be held at once")
    batch: int = Field(default=64, ge=1, description="sequences that run at once")
    budget: int = Field(default=2048, ge=2, description="tokens of a step, chunks of prompts included")
    policy: Literal["auto", "levels", "flat"] = Field(
        default="auto", description="of the planner; levels cascades wherever pages are shared"
    )
    compare: bool = Field(default=False, description="run flat too, compare the logits, and time both in turns")
    repeats: int = Field(default=3, ge=1, description="timed runs; the medians are shown")
    seed: int = Field(default=0, ge=0, description="of weights and tokens")


SUITE: dict[str, dict[str, Any]] = {
    "samples": {"samples": "8x8", "prompt": 4096, "output": 256},
    "tools": {"tools": 64, "output": 256},
    "conversation": {"trace": "conversation", "requests": 64, "max_prompt": 4096, "output": 256},
}
"""What is measured on a GPU, with what changes in `ServeOptions`."""

SMALL: dict[str, dict[str, Any]] = {
    "samples": {"samples": "4x4", "prompt": 250, "output": 16},
    "tools": {"tools": 12, "shrink": 16, "output": 16},
    "conversation": {"trace": "conversation", "requests": 8, "shrink": 16, "output": 16},
}
"""The same in small, for seconds on a CPU. At these sizes no cascade pays, so they are served with one by force."""

SMALL_OPTIONS: dict[str, Any] = {
    "compare": True,
    "repeats": 1,
    "batch": 16,
    "budget": 256,
    "policy": "levels",
    "model": "tiny",
    "device": "cpu",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests with a name.

    Attributes:
        name: short.
        description: in one line.
        requests: all there from the start.
    """

    name: str
    description: str
    requests: list[Request]

    @property
    def num_sequences(self) -> int:
        """Samples of all requests."""
        return sum(request.num_samples for request in self.requests)


def make_cases(options: ServeOptions, vocab_size: int) -> list[Case]:
    """What the options ask for, in the order samples, tools, trace."""
    cases, output, seed = [], options.output, options.seed
    if options.samples is not None:
        prompts, samples = map(int, options.samples.split("x"))
        made = sampled_prompts(prompts, samples, options.prompt, output, vocab_size, seed=seed)
        cases.append(Case("samples", f"{prompts} prompts of {options.prompt} tokens, {samples} samples each", made))
    if options.tools is not None:
        made = tool_calls(options.tools, output, vocab_size, shrink=options.shrink, seed=seed)
        cases.append(Case("tools", f"{options.tools} requests behind two tool descriptions", made))
    if options.trace is not None:
        path = TRACES.get(options.trace, Path(options.trace))
        made = trace_prompts(
            path,
            options.requests,
            output,
            vocab_size,
            shrink=options.shrink,
            max_prompt=options.max_prompt,
            seed=seed,
        )
        cases.append(Case(Path(options.trace).stem, f"{len(made)} prompts of a recorded trace", made))
    return cases
