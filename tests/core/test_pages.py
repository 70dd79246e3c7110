from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kdray.core.pages import PageAllocator

REQUESTS = st.sampled_from(["a", "b", "c", "d"])


class PageConservation(RuleBasedStateMachine):
    """Random reserves and releases beside a model that knows only how many tokens each holds."""

    @initialize(num_pages=st.integers(1, 12), page_size=st.sampled_from([1, 3, 16]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pages = PageAllocator(num_pages, page_size)
        self.held: dict[str, int] = {}

    @rule(request=REQUESTS, num_tokens=st.integers(0, 60))
    def reserve(self, request: str, num_tokens: int) -> None:
        before = self.pages.page_table(request)
        needed = -(-num_tokens // self.pages.page_size)
        fits = needed - len(before) <= self.pages.num_pages - sum(self.held.values())
        granted = self.pages.reserve(request, num_tokens)
        assert granted == fits
        after = self.pages.page_table(request)
        assert after[: len(before)].tolist() == before.tolist()
        if granted and needed > len(before):
            self.held[request] = needed
            assert len(after) == needed
        else:
            assert len(after) == len(before)

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.pages.release(request)
        self.held.pop(request, None)
        assert len(self.pages.page_table(request)) == 0

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pages.check()
        assert self.pages.num_used == sum(self.held.values())
        assert self.pages.num_free == self.pages.num_pages - self.pages.num_used

    def teardown(self) -> None:
        for request in list(self.held):
            self.pages.release(request)
        assert self.pages.num_free == self.pages.num_pages


TestPageConservation = PageConservation.TestCase


def test_a_page_is_added_only_past_the_boundary() -> None:
    pages = PageAllocator(num_pages=4, page_size=16)
    for num_tokens, held in [(0, 0), (1, 1), (16, 1), (17, 2), (5, 2)]:
        assert pages.reserve("a", num_tokens)
        assert len(pages.page_table("a")) == held == pages.num_used


def test_being_full_changes_nothing() -> None:
    pages = PageAllocator(num_pages=3, page_size=1)
    assert pages.reserve("a", 2)
    assert not pages.reserve("b", 2)
    assert pages.num_free == 1 and len(pages.page_table("b")) == 0
    assert pages.reserve("b", 1)


def test_a_page_table_is_read_only_and_outlives_growth() -> None:
    pages = PageAllocator(num_pages=3, page_size=1)
    pages.reserve("a", 1)
    given = pages.page_table("a")
    copy = given.copy()
    pages.reserve("a", 3)
    assert given.dtype == np.int32 and np.array_equal(given, copy)
    for table in (given, pages.page_table("a"), pages.page_table("nobody")):
        with pytest.raises(ValueError, match="read-only"):
            table[...] = 0


def test_the_audit_finds_a_leak_and_a_shared_page() -> None:
    leaking = PageAllocator(num_pages=3, page_size=1)
    leaking._free.pop()
    with pytest.raises(AssertionError, match="leaked or shared"):
        leaking.check()
    sharing = PageAllocator(num_pages=3, page_size=1)
    sharing.reserve("a", 1)
    sharing._tables["b"] = sharing._tables["a"]
    with pytest.raises(AssertionError, match="leaked or shared"):
        sharing.check()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(num_pages, page_size)
