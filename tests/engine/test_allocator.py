"""Pages: given once, counted exactly, found again by their content, the least recently used taken first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_cascade import CapacityError
from flashinfer_cascade.engine.allocator import ROOT, PageAllocator

SIZE = 2


def commit_all(allocator, pages, tokens):
    chain = ROOT
    for number, page in enumerate(pages):
        chain = allocator.commit(page, tokens[number * SIZE : (number + 1) * SIZE], chain)
    return chain


# Few tokens, so that prefixes are found again and again.
TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE).map(tuple)


@given(st.lists(st.one_of(TOKENS, st.integers(0, 9)), max_size=60), st.integers(5, 12))
def test_random_use(actions, num_pages):
    """Tokens come in as requests do; a number lets one of them go."""
    allocator = PageAllocator(num_pages, SIZE)
    holders: list[list[int]] = []
    content: dict[int, tuple[int, ...]] = {}  # all tokens up to the end of a page, since it was given last
    for action in actions:
        if isinstance(action, int):
            if holders:
                allocator.release(holders.pop(action % len(holders)))
        else:
            full = len(action) // SIZE
            found, chain = allocator.match(action, full)
            for number, page in enumerate(found):
                assert content[page] == action[: (number + 1) * SIZE]
            if full - len(found) > allocator.available_beside(found):
                continue
            before = {page for pages in holders for page in pages}
            allocator.hold(found)
            taken = allocator.take(full - len(found))
            assert not before.intersection(taken)
            assert not set(found).intersection(taken)
            for number, page in enumerate(taken, len(found)):
                content[page] = action[: (number + 1) * SIZE]
                chain = allocator.commit(page, action[number * SIZE : (number + 1) * SIZE], chain)
            holders.append(found + taken)
            # Right after a commit all of it is found, though not in these very pages.
            again, end = allocator.match(action, full)
            assert len(again) == full
            assert end == chain
        for page in range(num_pages):
            assert allocator.count(page) == sum(pages.count(page) for pages in holders)
        held = {page for pages in holders for page in pages}
        assert allocator.num_available == num_pages - len(held)
        assert allocator.num_cached <= allocator.num_available
    for pages in holders:
        allocator.release(pages)
    assert allocator.num_available == num_pages
    assert sorted(allocator.take(num_pages)) == list(range(num_pages))


def test_free_pages_go_first_then_the_least_recently_used_tails_before_heads():
    allocator = PageAllocator(5, SIZE)
    first, second = allocator.take(2), allocator.take(2)
    commit_all(allocator, first, (1, 1, 2, 2))
    commit_all(allocator, second, (3, 3, 4, 4))
    allocator.release(first)
    allocator.release(second)
    assert (allocator.num_available, allocator.num_cached) == (5, 4)
    allocator.hold(allocator.match((1, 1), 1)[0])  # used again, so now the most recent
    allocator.release(first[:1])
    (free,) = allocator.take(1)
    assert free not in first + second
    assert allocator.take(4) == [first[1], second[1], second[0], first[0]]
    assert allocator.match((1, 1), 1) == ([], ROOT)


def test_equal_tokens_behind_different_prefixes_are_different():
    allocator = PageAllocator(4, SIZE)
    a, b = allocator.take(2), allocator.take(2)
    commit_all(allocator, a, (1, 1, 5, 5))
    commit_all(allocator, b, (2, 2, 5, 5))
    assert allocator.match((1, 1, 5, 5), 2)[0] == a
    assert allocator.match((2, 2, 5, 5), 2)[0] == b
    assert allocator.match((2, 2, 5, 5), 1)[0] == b[:1]
    assert allocator.match((5, 5), 1)[0] == []


def test_the_first_page_of_a_content_stays_the_known_one():
    allocator = PageAllocator(2, SIZE)
    (a,), (b,) = allocator.take(1), allocator.take(1)
    assert allocator.commit(a, (7, 7), ROOT) == allocator.commit(b, (7, 7), ROOT)
    allocator.release([b])
    assert (allocator.match((7, 7), 1)[0], allocator.num_cached) == ([a], 0)
    allocator.release([a])
    assert allocator.num_cached == 1


def test_more_than_there_is_is_refused_and_nothing_given():
    allocator = PageAllocator(3, SIZE)
    allocator.take(1)
    with pytest.raises(CapacityError, match="3 pages asked for, 2 of 3 available: wait, or preempt"):
        allocator.take(3)
    assert allocator.num_available == 2
