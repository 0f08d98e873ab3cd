"""Measures cases one after the other, and keeps every row as soon as there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashinfer_cascade.bench.candidates import Candidate, candidates
from flashinfer_cascade.bench.cases import Case
from flashinfer_cascade.bench.oracle import make_oracle
from flashinfer_cascade.bench.records import describe_machine
from flashinfer_cascade.bench.results import SCHEMA, Measured, Record, Row, read_record, write_record
from flashinfer_cascade.bench.roof import roof
from flashinfer_cascade.bench.timing import Captured, KvPool, capture, take_turns
from flashinfer_cascade.errors import CascadeError, InvalidBatchError


@dataclass(slots=True)
class Gpu:
    """Measures cases on one GPU.

    Attributes:
        device: which.
        pool_bytes: for KV caches.
        repeats: interleaved turns of each case.
        replays: of each candidate in each turn.
    """

    device: torch.device
    pool_bytes: int
    repeats: int = 5
    replays: int = 5
    _pool: KvPool | None = None

    def measure(self, case: Case) -> Row:
        """All candidates of a case: times, and results held against the oracle.

        Raises:
            MemoryError: the pool is too small for its KV.
            CascadeError: none of the candidates ran.
        """
        work, config = case.build()
        caches = self._caches(getattr(torch, case.kv_dtype)).caches(config, work.num_pages)
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (work.num_rows, config.num_qo_heads, config.head_dim)
        q = torch.randn(shape, generator=generator, device=self.device).bfloat16()
        built: dict[str, Candidate] = {}
        captured: dict[str, Captured] = {}
        refused: dict[str, str] = {}
        for name, build in candidates(config, work, q).items():
            try:
                candidate = build()
                captured[name] = capture(candidate.call, caches)
            except Exception as error:  # whatever FlashInfer or a compiler raises must not cost the other candidates
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # a broken context ends the run here
                refused[name] = _in_one_line(error)
            else:
                built[name] = candidate
        if not captured:
            raise CascadeError(f"{case}: no candidate ran: {refused}")
        times = take_turns(captured, self.repeats, self.replays)
        oracle = make_oracle(config, work, q, caches[-1])
        results = {}
        for name, measured in times.items():
            out, row_rank = captured[name].rerun(), built[name].row_rank
            worst = oracle.max_error(out if row_rank is None else out[row_rank])
            low, high = measured.spread_us
            results[name] = Measured(
                us=round(measured.us, 2),
                low_us=round(low, 2),
                high_us=round(high, 2),
                max_error=None if worst is None else round(worst, 5),
            )
        return Row(
            **case._asdict(),
            description=work.description,
            num_requests=work.num_requests,
            num_rows=work.num_rows,
            roof_us=round(roof(config, work).us, 2),
            repeats=self.repeats,
            checked_rows=len(oracle.rows),
            error_budget=round(oracle.budget, 5),
            results=results,
            refused=refused,
            choices={name: one.choice for name, one in built.items() if one.choice is not None},
        )

    def _caches(self, dtype: torch.dtype) -> KvPool:
        if self._pool is None or self._pool.dtype != dtype:
            self._pool = None  # frees the old one first
            self._pool = KvPool(self.pool_bytes, dtype, self.device)
        return self._pool


def _in_one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"


def begin_record(path: Path | None, *, resume: bool, commit: str | None) -> Record:
    """A new record of this machine, or the one at `path` to be continued.

    Args:
        path: where it will be written; None nowhere.
        resume: continue what is there, if anything is.
        commit: of the code that is measured; None asks git.

    Raises:
        InvalidBatchError: there is a record and it is not to be continued, or it is of another machine or commit.
    """
    head: dict[str, Any] = describe_machine(commit)
    if path is None or not path.exists():
        return Record(schema_version=SCHEMA, **head)
    if not resume:
        raise InvalidBatchError(f"{path} exists: continue it with --resume, or write to another file")
    record = read_record(path)
    for name in ("hardware", "versions", "commit"):
        if getattr(record, name) != head[name]:
            raise InvalidBatchError(
                f"{path} was measured with {name} {getattr(record, name)}, but here it is {head[name]}: "
                "write to another file"
            )
    return record


def run(
    cases: Iterable[Case],
    record: Record,
    path: Path | None,
    measure: Callable[[Case], Row],
    deadline: float | None = None,
) -> Iterator[tuple[Case, Row | str | None]]:
    """Measure the cases that the record lacks, and write the record after each.

    Args:
        cases: in this order.
        record: gets a row, or a reason why there is none, for each of them.
        path: where to; None is nowhere.
        measure: a case's row, such as `Gpu.measure`.
        deadline: `time.monotonic` after which no case is begun.

    Yields:
        Each case with its row, or why it has none; None if it had one before.
    """
    have = {row.case[1:] for row in record.rows}
    for case in cases:
        outcome: Row | str | None = None
        if case[1:] not in have:
            if deadline is not None and time.monotonic() > deadline:
                outcome = record.left_out[str(case)] = "the deadline was reached"
            else:
                record.left_out.pop(str(case), None)
                try:
                    outcome = measure(case)
                    record.rows.append(outcome)
                except (MemoryError, torch.cuda.OutOfMemoryError, CascadeError) as error:
                    outcome = record.left_out[str(case)] = _in_one_line(error)
            if path is not None:
                write_record(record, path)
        yield case, outcome
