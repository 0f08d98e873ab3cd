"""Batches of real request streams: Mooncake's traces and tree-of-thought searches.

The shipped excerpts and their licences are described in ``data/traces/README.md``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashinfer_cascade.bench.workloads import DATA, Spans, Workload, workload
from flashinfer_cascade.errors import InvalidBatchError

CONVERSATION = DATA / "traces" / "mooncake_fast25_conversation_first300.jsonl"
SYNTHETIC = DATA / "traces" / "mooncake_fast25_synthetic_first300.jsonl"
TREE_OF_THOUGHT = DATA / "traces" / "deft_tot_trees.json"

BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for. Source: the paper's appendix on its traces."""

MAX_GENERATED = 32


class Prompt(NamedTuple):
    """A request of a trace: tokens of its input, and the ids of its blocks of `BLOCK_TOKENS`."""

    input_length: int
    hash_ids: list[int]


def read_mooncake(path: Path) -> Iterator[Prompt]:
    """Read a trace in Mooncake's form, checking each line as it comes.

    Raises:
        InvalidBatchError: names the file and the line that is malformed or contradicts an earlier one.
    """
    above: dict[int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                prompt = _prompt(where, line)
                for parent, block in zip([-1, *prompt.hash_ids], prompt.hash_ids, strict=False):
                    if above.setdefault(block, parent) != parent:
                        raise InvalidBatchError(
                            f"{where}: block {block} follows {parent} here and {above[block]} before, "
                            "but an id stands for its whole prefix (-1 is the start)"
                        )
                yield prompt


def _prompt(where: str, line: bytes) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bytes that are no text, and brackets without end
        raise InvalidBatchError(f"{where}: not JSON ({error})") from error
    for key in Prompt._fields:
        if not isinstance(row, dict) or key not in row:
            raise InvalidBatchError(f"{where}: no {key}, which each line of a Mooncake trace has")
    length, ids = row["input_length"], row["hash_ids"]
    numbers = [length, *ids] if isinstance(ids, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise InvalidBatchError(f"{where}: input_length and hash_ids must be integers, at least 0")
    blocks = -(-length // BLOCK_TOKENS)
    if blocks != len(ids) or not blocks:
        raise InvalidBatchError(
            f"{where}: input_length {length} is {blocks} blocks of {BLOCK_TOKENS}, but it has {len(ids)} ids"
        )
    return Prompt(length, ids)


def mooncake_batches(
    path: Path,
    batch: int,
    page_size: int = 16,
    samples: int = 1,
    max_context: int | None = None,
    seed: int = 0,
) -> Iterator[Workload]:
    """Decode batches of a trace's consecutive prompts.

    With one sample, a prompt is a request at the step that computes its last token. With several, each prompt
    is forked into that many requests, and each of these has 1 to `MAX_GENERATED` generated tokens of its own.

    Args:
        path: a trace in Mooncake's JSONL form.
        batch: prompts in a batch; the last may have fewer.
        page_size: tokens a page holds.
        samples: requests a prompt.
        max_context: prompts are cut to their first so many tokens; None leaves them.
        seed: draws the generated lengths.

    Raises:
        InvalidBatchError: the file is wrong, or a number is below 1.
    """
    for name, value in (("batch", batch), ("samples", samples), ("max_context", max_context)):
        if value is not None and value < 1:
            raise InvalidBatchError(f"{name}={value} must be at least 1")
    rng = np.random.default_rng(seed)
    waiting: list[Prompt] = []
    first = 0

    def close() -> Workload:
        paths: list[Spans] = [_blocks(prompt, max_context) for prompt in waiting]
        if samples > 1:
            paths = [
                [*spans, (f"{r}.{sample}", int(rng.integers(1, MAX_GENERATED, endpoint=True)))]
                for r, spans in enumerate(paths)
                for sample in range(samples)
            ]
        last = first + len(waiting)
        return workload(
            f"{path.stem}-{first}-{last}" + (f"x{samples}" if samples > 1 else ""),
            paths,
            page_size,
            description=f"prompts {first} to {last - 1} of {path.name}, {samples} samples each",
        )

    for prompt in read_mooncake(path):
        waiting.append(prompt)
        if len(waiting) == batch:
            yield close()
            first += len(waiting)
            waiting.clear()
    if waiting:
        yield close()


def _blocks(prompt: Prompt, max_context: int | None) -> Spans:
    """A short last block is the same in two prompts only when it is equally long."""
    length = prompt.input_length if max_context is None else min(prompt.input_length, max_context)
    ends = range(BLOCK_TOKENS, length + BLOCK_TOKENS, BLOCK_TOKENS)
    tokens = [BLOCK_TOKENS + min(length - end, 0) for end in ends]
    return [((block, count), count) for block, count in zip(prompt.hash_ids, tokens, strict=False)]


class Thought(NamedTuple):
    """A node of a tree-of-thought search; generates one token an iteration, its first at ``start``."""

    id: int
    parent: int
    tokens: int
    start: int
    end: int


def read_thoughts(path: Path, task: str) -> list[dict[int, Thought]]:
    """A task's trees, nodes by id; a search that never began is empty.

    Raises:
        InvalidBatchError: the file is malformed or lacks the task, or a tree contradicts itself.
    """
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))
        if task not in tasks:
            raise KeyError(f"no task {task!r}, only {', '.join(tasks)}")
        trees = [{node[0]: Thought(*map(int, node)) for node in tree["nodes"]} for tree in tasks[task]]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = error.args[0] if error.args else error
        raise InvalidBatchError(f"{path}: not lists of tree-of-thought trees by task ({reason})") from error
    for index, thoughts in enumerate(trees):
        for thought in thoughts.values():
            parent = thoughts.get(thought.parent)
            if thought.end - thought.start + 1 != thought.tokens or thought.tokens < 1:
                wrong = f"generates {thought.tokens} tokens in iterations {thought.start} to {thought.end}"
            elif thought.parent >= 0 and (parent is None or parent.end >= thought.start):
                wrong = f"has a parent {thought.parent} that does not exist or end before it starts"
            else:
                continue
            raise InvalidBatchError(f"{path}: {task} tree {index}: node {thought.id} {wrong}")
    return trees


def tot_batches(
    path: Path,
    task: str,
    iterations: Iterable[int],
    page_size: int = 16,
    trees: Collection[int] | None = None,
) -> Iterator[Workload]:
    """Decode batches of tree-of-thought searches that run side by side.

    The requests at an iteration are the nodes that generate then, each behind all its ancestors, which have
    ended and are complete. A node that generates at iterations ``start`` to ``end`` has
    ``iteration - start + 1`` tokens. Iterations at which nothing is alive are skipped.

    Args:
        path: trees in the shipped file's form.
        task: one of its tasks.
        iterations: steps of the search, from 1 on; prompts end at 0.
        page_size: tokens a page holds.
        trees: indices of the trees to run; None is all.

    Raises:
        InvalidBatchError: see `read_thoughts`.
    """
    chosen = [
        (index, thoughts) for index, thoughts in enumerate(read_thoughts(path, task)) if trees is None or index in trees
    ]
    for iteration in iterations:
        paths: list[Spans] = [
            _path(index, thoughts, thought, iteration)
            for index, thoughts in chosen
            for thought in thoughts.values()
            if thought.start <= iteration <= thought.end
        ]
        if paths:
            yield workload(
                f"{task}-{iteration}",
                paths,
                page_size,
                description=f"{len(paths)} branches of {task} of {path.name} at iteration {iteration}",
            )


def _path(index: int, thoughts: dict[int, Thought], thought: Thought, iteration: int) -> Spans:
    spans: list[tuple[Any, int]] = [((index, thought.id), iteration - thought.start + 1)]
    while thought.parent >= 0:
        thought = thoughts[thought.parent]
        spans.append(((index, thought.id), thought.tokens))
    return spans[::-1]
