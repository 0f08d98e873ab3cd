"""Scheduling on lengths alone, against a simulated cache that remembers what was written where."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CapacityError, CascadeConfig, CascadePlanner, InvalidBatchError
from flashinfer_cascade.engine.config import EngineConfig
from flashinfer_cascade.engine.requests import Request
from flashinfer_cascade.engine.scheduler import Scheduler

SIZE = 4


def scheduler_of(num_pages=64, max_batch_size=8, max_num_tokens=24, max_seq_len=64):
    config = EngineConfig(
        num_pages=num_pages,
        page_size=SIZE,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
    )
    planner = CascadePlanner(
        CascadeConfig(
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=64,
            page_size=SIZE,
            dtype="bfloat16",
            max_batch_size=max_batch_size,
            max_num_rows=max_num_tokens,
            max_kv_pages=num_pages + 1,
            max_kv_indices=4096,
        )
    )
    return Scheduler(config, planner.session())


@dataclass
class Device:
    """Runs steps: a slot's KV is what it depends on, all tokens up to its own."""

    scheduler: Scheduler
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    batches: list = field(default_factory=list)

    def run(self, overlap):
        """Serve to the end; with overlap, a step's tokens come once the next one is scheduled, as in the engine."""
        flight = None
        while True:
            step = self.prepare()
            if overlap and flight is not None:
                self.complete(flight)
            if step is None:
                return
            self.launch(*step)
            flight = step[0]
            if not overlap:
                self.complete(flight)

    def prepare(self):
        batch = self.scheduler.schedule()
        if batch is None:
            assert not len(self.scheduler.session)
            return None
        session, allocator, config = self.scheduler.session, self.scheduler.allocator, self.scheduler.config
        plan = session.plan()
        sequences = [rows.sequence for rows in batch.rows]
        # The session knows what the engine does.
        assert session.ids == [sequence.id for sequence in sequences]
        assert plan.num_rows == batch.num_rows <= config.max_num_tokens
        assert np.diff(plan.qo_indptr)[np.argsort(plan.request_order)].tolist() == [
            rows.end - rows.begin for rows in batch.rows
        ]
        for rows in batch.rows:
            assert rows.end > rows.begin
            assert session.seq_len(rows.sequence.id) == rows.end
            assert session.block_table(rows.sequence.id).tolist() == rows.sequence.pages
        # Counts are exact, and no two rows write to one slot.
        for page in range(config.num_pages):
            assert allocator.count(page) == sum(sequence.pages.count(page) for sequence in sequences)
        written = [slot for rows in batch.rows for slot in self.slots_of(rows.sequence, rows.begin, rows.end)]
        assert len(written) == len(set(written))
        assert len(sequences) + sum(s.num_samples - 1 for s in sequences) <= config.max_batch_size
        return batch, [list(sequence.pages) for sequence in sequences]

    @staticmethod
    def slots_of(sequence, begin, end):
        return [(sequence.pages[at // SIZE], at % SIZE) for at in range(begin, end)]

    def launch(self, batch, tables):
        self.batches.append(batch)
        before = dict(self.slots)
        for source, target in batch.copies:
            for place in range(SIZE):
                self.slots[target, place] = before.get((source, place), ())
        for rows, table in zip(batch.rows, tables, strict=True):
            for at in range(rows.begin, rows.end):
                self.slots[table[at // SIZE], at % SIZE] = tuple(rows.sequence.tokens[: at + 1])
        # Every row finds the KV of its own sequence, whoever wrote it, and whatever others wrote in this step.
        for rows, table in zip(batch.rows, tables, strict=True):
            for at in range(rows.end):
                assert self.slots[table[at // SIZE], at % SIZE] == tuple(rows.sequence.tokens[: at + 1])

    def complete(self, batch):
        likely = []
        for rows in batch.rows:
            if rows.receivers:
                last = sum(rows.sequence.tokens[: rows.end])
                likely.append([(last + sample) % 3 for sample in range(len(rows.receivers))])
        self.scheduler.complete(batch, likely)


def continued(request, sample):
    """What `Device.complete` samples: it depends on a sequence's own tokens alone."""
    tokens = list(request.prompt)
    for number in range(request.max_new_tokens):
        tokens.append((sum(tokens) + (0 if number else sample)) % 3)
    return tokens[len(request.prompt) :]


def serve(scheduler, requests, overlap=True):
    device = Device(scheduler)
    for request in requests:
        scheduler.submit(request)
    device.run(overlap)
    assert scheduler.allocator.num_available == scheduler.config.num_pages
    assert not any(map(scheduler.allocator.count, range(scheduler.config.num_pages)))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    expected = {(r.id, sample): continued(r, sample) for r in requests for sample in range(r.num_samples)}
    assert scheduler.outputs == expected
    return device


REQUEST = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.integers(0, 3),  # pages of a common beginning
    st.integers(1, 12),
    st.integers(1, 4),
)


@given(
    st.lists(REQUEST, min_size=1, max_size=8), st.integers(14, 40), st.integers(4, 8), st.integers(9, 40), st.booleans()
)
def test_random_requests_in_few_pages(given_requests, num_pages, batch, budget, overlap):
    requests = [
        Request(id, [0] * (SIZE * common) + own, new, samples)
        for id, (own, common, new, samples) in enumerate(given_requests)
    ]
    scheduler = scheduler_of(num_pages, batch, budget)
    serve(scheduler, requests, overlap)
    assert scheduler.stats.max_held_pages <= num_pages


def steps(device):
    """(id, begin, end) of each sequence in each step."""
    return [[(tuple(rows.sequence.id), rows.begin, rows.end) for rows in batch.rows] for batch in device.batches]


def test_prompts_come_in_chunks_beside_decodes():
    device = serve(scheduler_of(max_num_tokens=10), [Request(0, [1] * 5, 4), Request(1, [2] * 12, 2)])
    assert steps(device) == [
        [((0, 0), 0, 5), ((1, 0), 0, 5)],
        [((0, 0), 5, 6), ((1, 0), 5, 12)],
        [((0, 0), 6, 7), ((1, 0), 12, 13)],
        [((0, 0), 7, 8)],
    ]


def test_samples_share_the_prompt_and_copy_its_last_page_when_they_write():
    scheduler = scheduler_of()
    device = serve(scheduler, [Request(0, [0, 1] * 3, 3, num_samples=3)])
    prompt, fork, last = device.batches
    assert [len(rows.receivers) for rows in prompt.rows] == [3]
    assert [rows.begin for rows in fork.rows] == [6, 6, 6]
    # The last holder writes in place.
    shared = {source for source, _ in fork.copies}
    assert (len(fork.copies), len(shared), scheduler.stats.copied_pages) == (2, 1, 2)
    assert not last.copies


def test_samples_of_a_prompt_that_ends_with_a_page_copy_nothing():
    scheduler = scheduler_of()
    serve(scheduler, [Request(0, [0, 1] * 4, 6, num_samples=3)])
    assert scheduler.stats.copied_pages == 0
    # Two pages of the prompt, and two of each sample: the last token is never put in.
    assert scheduler.stats.max_held_pages == 2 + 3 * 2


def test_a_prompt_is_found_again_but_for_its_last_token():
    scheduler = scheduler_of(max_batch_size=1)
    device = serve(scheduler, [Request(0, [1] * 12, 2), Request(1, [1] * 12, 1)])
    assert steps(device) == [[((0, 0), 0, 12)], [((0, 0), 12, 13)], [((1, 0), 8, 12)]]
    assert scheduler.stats.cached_tokens == 8


def test_generated_tokens_are_found_again_page_by_page():
    first = Request(0, [1] * 6, 11)
    whole = first.prompt + continued(first, 0)
    scheduler = scheduler_of(max_batch_size=1)
    serve(scheduler, [first, Request(1, [*whole, 2, 2], 1)])
    # 17 tokens, the last of which was never put in: 4 full pages.
    assert scheduler.stats.cached_tokens == 16


def test_a_request_finds_what_another_computes_in_the_same_step():
    device = serve(scheduler_of(), [Request(0, [1] * 10, 1), Request(1, [1] * 9, 1)])
    assert steps(device) == [[((0, 0), 0, 10), ((1, 0), 8, 9)]]


def test_without_pages_the_last_to_join_gives_way_and_comes_back_first():
    # Each has 2 pages at first and 4 in the end; 6 are there.
    scheduler = scheduler_of(num_pages=6)
    device = serve(scheduler, [Request(id, [id] * 5, 12) for id in range(3)])
    names = [[name for (name, _), _, _ in step] for step in steps(device)]
    assert names[0] == [0, 1]
    assert scheduler.stats.preemptions == 1
    gone = names.index([0])
    back = names.index([1], gone)
    assert set(map(tuple, names[gone:back])) <= {(0,)}
    assert names[back:][-1] == [2]
    # It goes on behind what it had, from pages that nobody needed meanwhile.
    reached = max(end for step in steps(device)[:gone] for id, _, end in step if id == (1, 0))
    (((_, begin, end),),) = (steps(device)[back],)
    assert (begin % SIZE, end) == (0, reached + 1)


def test_requests_wait_for_pages_and_seats_in_order():
    device = serve(scheduler_of(max_batch_size=3), [Request(0, [1], 3, 2), Request(1, [2], 3, 2), Request(2, [3], 3)])
    names = [sorted({name for (name, _), _, _ in step}) for step in steps(device)]
    # Request 2 would fit beside request 0, but it is not its turn.
    assert names[0] == [0]
    assert [0, 2] not in names
    assert [1, 2] in names


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(7, [], 1), InvalidBatchError, "request 7: 0 prompt tokens, 1 to generate, 1 samples"),
        (Request(7, [1], 0), InvalidBatchError, "1 prompt tokens, 0 to generate"),
        (Request(7, [1], 1, 0), InvalidBatchError, "1 to generate, 0 samples"),
        (Request(7, [1] * 60, 5), CapacityError, "request 7 can never run: max_seq_len 65 > 64, num_pages 17 > 15"),
        (Request(7, [1] * 60, 4, 9), CapacityError, "num_pages 16 > 15, max_batch_size 9 > 8"),
    ],
)
def test_what_can_never_run_is_refused_at_once(request_, error, message):
    scheduler = scheduler_of(num_pages=15)
    with pytest.raises(error, match=message):
        scheduler.submit(request_)
    assert scheduler.num_waiting == 0


def test_sizes_leave_room_for_prompts():
    with pytest.raises(ValueError, match="max_num_tokens=8 must exceed max_batch_size=8"):
        scheduler_of(max_num_tokens=8)
