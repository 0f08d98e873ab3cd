"""What an engine is asked for, what it keeps of each sequence that it generates, and a step over several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from flashinfer_cascade.engine.allocator import ROOT


class SequenceId(NamedTuple):
    """Names a sequence, also to the planner's session."""

    request: int
    sample: int


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to continue.

    Attributes:
        id: unique among the requests of a run.
        prompt: token ids, at least one.
        max_new_tokens: to generate, for each sample.
        num_samples: how often to continue the prompt. Sample i begins with the i-th most likely token; from there
            on all are greedy.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    num_samples: int = 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, from its prompt on.

    Attributes:
        id: its name.
        tokens: those known so far, prompt and generated.
        prompt_len: tokens of the prompt.
        max_len: tokens of prompt and generation together.
        num_samples: sequences that this one will be when its prompt is computed.
        num_pending: tokens that scheduled steps sample, and that are not known yet.
        pages: its block table.
        scheduled_len: tokens whose KV is in the cache once the scheduled steps have run.
        num_rows: of these, tokens of the last such step.
        num_committed: its first pages, whose content the allocator knows.
        chain: of the last of these.
    """

    id: SequenceId
    tokens: list[int]
    prompt_len: int
    max_len: int
    num_samples: int = 1
    num_pending: int = 0
    pages: list[int] = field(default_factory=list)
    scheduled_len: int = 0
    num_rows: int = 0
    num_committed: int = 0
    chain: int = ROOT

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """The first sample of a request."""
        length = len(request.prompt)
        return cls(
            SequenceId(request.id, 0),
            list(request.prompt),
            length,
            length + request.max_new_tokens,
            request.num_samples,
        )

    @property
    def length(self) -> int:
        """Tokens, the pending ones included."""
        return len(self.tokens) + self.num_pending

    def fork(self, sample: int) -> Sequence:
        """Another sample, whose first token is pending too; without pages yet."""
        return Sequence(SequenceId(self.id.request, sample), list(self.tokens), self.prompt_len, self.max_len, 1, 1)

    def advance(self, num_rows: int) -> None:
        """Schedule its next tokens."""
        self.num_rows = num_rows
        self.scheduled_len += num_rows

    def forget_pages(self) -> list[int]:
        """Start from nothing computed; returns the pages that it held."""
        pages, self.pages = self.pages, []
        self.scheduled_len, self.num_committed, self.chain = 0, 0, ROOT
        return pages


class Rows(NamedTuple):
    """A sequence's rows in a step.

    Attributes:
        sequence: whose.
        begin, end: positions of its tokens.
        receivers: sequences that get a token sampled from the last row; none while a prompt is incomplete.
    """

    sequence: Sequence
    begin: int
    end: int
    receivers: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step.

    Attributes:
        rows: of each running sequence, in the order of the planner's session.
        copies: pages to copy before anything is written, from and to.
        num_rows: query tokens.
        num_flat_tokens: KV tokens that attention reads without a cascade: every sequence's whole context.
    """

    rows: list[Rows]
    copies: list[tuple[int, int]]
    num_rows: int
    num_flat_tokens: int
