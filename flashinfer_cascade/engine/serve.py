"""The serving demonstration: an engine for some cases, each served flat and with cascades, and the record of it."""

from __future__ import annotations

import datetime
import os
import platform
import time
from typing import Any

import torch
from rich.console import Console

from flashinfer_cascade.bench.records import describe_machine
from flashinfer_cascade.config import PlannerPolicy
from flashinfer_cascade.engine.cases import Case, ServeOptions, make_cases
from flashinfer_cascade.engine.compare import FLAT, compare
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.engine import Engine
from flashinfer_cascade.engine.model import LLAMA_8B, TINY, Llama, ModelShape
from flashinfer_cascade.engine.requests import Sequence
from flashinfer_cascade.engine.show import live_progress, print_case
from flashinfer_cascade.errors import InvalidBatchError

POLICIES = {"auto": PlannerPolicy(), "levels": PlannerPolicy(executor="levels", fold=False), "flat": FLAT}
"""The planner's own choice; a cascade over every shared node whether that pays or not; none."""

MEMORY_SHARE = 0.6
"""Of the device's free memory that the KV cache may take."""


def serve(
    options: ServeOptions, changes: dict[str, dict[str, Any]], console: Console, commit: str | None = None
) -> dict[str, Any]:
    """Serve some cases with one engine, one after the other, and print what came of it.

    Args:
        options: of all cases.
        changes: name -> what differs in `options` for this case; empty takes what the options ask for.
        console: for progress and tables.
        commit: of the code, for the record; None asks git.

    Returns:
        The record: machine, engine, and each case's runs.

    Raises:
        InvalidBatchError: nothing to serve is given.
        CapacityError: a request could never run with these sizes.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        torch.set_num_threads(1)  # thousands of small products: threads would mostly wait for each other
    shape = _shape(options, device)
    each = [options.model_copy(update=change) for change in changes.values()] or [options]
    cases = [case for one in each for case in make_cases(one, shape.vocab_size)]
    if not cases:
        raise InvalidBatchError("nothing to serve: give samples, tools or a trace")
    config = _sizes(options, shape, cases, device)
    begin = time.perf_counter()
    with console.status(f"{device}: making a model of {shape.num_layers} layers, capturing graphs"):
        engine = Engine(Llama(shape, config.max_seq_len, device, seed=options.seed), config)
    pool = engine.pool
    record: dict[str, Any] = {
        "what": "each run serves all requests of a case from an empty cache; KV bytes are those of all layers, counted "
        "from the plans; plan_us: host time a step of telling the session what changed and of planning",
        **_machine(device, commit),
        "model": shape.model_dump(),
        "engine": config.model_dump(),
        "policy": options.policy,
        "captured": {
            "graphs": pool.stats.captures,
            "seconds": round(time.perf_counter() - begin, 1),
            "megabytes": round(pool.memory_bytes / 1e6),
        },
        "cases": [],
    }
    console.print(
        f"[bold]{record['hardware'].get('gpu', 'CPU, reference executor')}[/], {shape.num_layers} layers of "
        f"{shape.hidden_size}, {config.num_pages} pages of {config.page_size} tokens, steps of at most "
        f"{config.max_num_tokens} tokens and {config.max_batch_size} sequences",
        highlight=False,
    )
    policy = POLICIES[options.policy]
    for case in cases:
        numbers: dict[str, Any] = {
            "name": case.name,
            "description": case.description,
            "requests": len(case.requests),
            "sequences": case.num_sequences,
        }
        with live_progress(console, case) as on_step:
            if options.compare:
                comparison = compare(engine, case.requests, policy, repeats=options.repeats, on_step=on_step)
                numbers |= comparison.record()
            else:
                runs = [engine.run(case.requests, policy, on_step=on_step) for _ in range(options.repeats)]
                numbers["runs"] = [result.record() for result in runs]
        record["cases"].append(numbers)
        print_case(numbers, console)
    return record


def agrees(record: dict[str, Any]) -> bool:
    """Whether the logits of all cases that were compared are within their bounds."""
    return all(case["agreement"]["ok"] for case in record["cases"] if "agreement" in case)


def _shape(options: ServeOptions, device: torch.device) -> ModelShape:
    is_tiny = options.model == "tiny" or (options.model == "auto" and device.type == "cpu")
    shape = TINY if is_tiny else LLAMA_8B
    return shape if options.layers is None else shape.model_copy(update={"num_layers": options.layers})


def _sizes(options: ServeOptions, shape: ModelShape, cases: list[Case], device: torch.device) -> EngineConfig:
    """An engine that holds the longest sequences of the largest case without sharing, if there is memory."""
    longest, needed = 0, 0
    for case in cases:
        lens = sorted(
            (length for r in case.requests for length in [Sequence.of(r).max_len] * r.num_samples), reverse=True
        )
        longest = max(longest, lens[0])
        needed = max(needed, sum(-(-length // options.page_size) for length in lens[: options.batch]))
    sizes = EngineConfig(
        num_pages=options.pages or needed,
        page_size=options.page_size,
        max_batch_size=options.batch,
        max_num_tokens=options.budget,
        max_seq_len=longest,
    )
    if device.type == "cuda" and options.pages is None:
        page_bytes = shape.cascade_config(sizes).kv_token_bytes * options.page_size * shape.num_layers
        room = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) // page_bytes
        sizes = sizes.model_copy(update={"num_pages": max(1, min(needed, room))})
    return sizes


def _machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    if device.type == "cuda":
        return describe_machine(commit)
    return {
        "hardware": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"torch": torch.__version__},
        "commit": commit or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
