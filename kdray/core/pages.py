"""Which pages of the KV cache belong to which request.

Position p of a request lives in slot page_table[p // page_size] * page_size + p % page_size. The
same page ids address every layer's cache of the target and the drafter's cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

_NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
_NO_PAGES.flags.writeable = False


class PageAllocator:
    """Hands out pages and takes them back; a page has one owner at a time.

    A request that never reserved anything holds an empty page table.

    covered   request id -> positions its page table reaches; for reading
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the next page is the last
        self._tables: dict[str, Int32Array] = {}
        self.covered: dict[str, int] = {}

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Grow the request's page table to cover num_tokens positions; never shrinks it.

        False, and nothing is changed, where too few pages are free.
        """
        missing = self.missing(request_id, num_tokens)
        if missing == 0:
            return True
        if missing > self.num_free:
            return False
        table = self.page_table(request_id)
        taken = [self._free.pop() for _ in range(missing)]
        # Tables are replaced, never written: whoever holds one in a plan keeps what he was given.
        grown = np.concatenate([table, np.array(taken, dtype=np.int32)])
        grown.flags.writeable = False
        self._tables[request_id] = grown
        self.covered[request_id] = len(grown) * self.page_size
        return True

    def missing(self, request_id: str, num_tokens: int) -> int:
        """Pages that reserve would take."""
        uncovered = num_tokens - self.covered.get(request_id, 0)
        return self.pages_for(uncovered) if uncovered > 0 else 0

    def release(self, request_id: str) -> None:
        """Take back all pages of the request; nothing happens where it holds none."""
        self._free.extend(reversed(self._tables.pop(request_id, _NO_PAGES).tolist()))
        self.covered.pop(request_id, None)

    def page_table(self, request_id: str) -> Int32Array:
        """[P] int32 page ids in the order of positions, read-only."""
        return self._tables.get(request_id, _NO_PAGES)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens positions."""
        return -(-num_tokens // self.page_size)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def check(self) -> None:
        """Audit: every page is free or has one owner. Raises AssertionError otherwise."""
        owned = [page for table in self._tables.values() for page in table.tolist()]
        everything = sorted(self._free + owned)
        if everything != list(range(self.num_pages)):
            raise AssertionError(
                f"pages leaked or shared: {len(self._free)} free and {len(owned)} owned make "
                f"{len(set(everything))} different pages of {self.num_pages}"
            )
