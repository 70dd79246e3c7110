"""Who waits and who runs: the queue, the slots and the pages of every request."""

from __future__ import annotations

from collections import deque

from kdray.core.pages import PageAllocator
from kdray.core.request import FinishReason, Request, RequestStatus
from kdray.errors import InvalidRequest


class Roster:
    """Requests on their way: queued, admitted in order, preempted by recompute, retired.

    running   in order of admission; for reading
    """

    def __init__(self, pages: PageAllocator, slots: int) -> None:
        self.pages = pages
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()  # of waiting and running requests
        self._free_slots = list(range(slots))[::-1]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admissible(self) -> int:
        """Of those who wait, how many have a slot; their pages may be short."""
        return min(len(self._waiting), len(self._free_slots))

    def refuse_known(self, request: Request) -> None:
        """Raises InvalidRequest where a request of the same id is still open."""
        if request.request_id in self._ids:
            raise InvalidRequest(
                f"request_id {request.request_id!r} belongs to a request that is still open; "
                "pages and outputs go by it, so give every request its own",
                param="request_id",
            )

    def queue(self, request: Request) -> None:
        self.refuse_known(request)
        self._ids.add(request.request_id)
        self._waiting.append(request)

    @property
    def next_in_line(self) -> Request | None:
        """Whoever is admitted next; None where nobody waits or every slot is taken."""
        return self._waiting[0] if self._waiting and self._free_slots else None

    def admit(self, places: int) -> Request | None:
        """The next in line, running from now on with pages for so many token places.

        None where pages are short: full is a wait, and whoever comes first is served first.
        """
        if not self.pages.reserve(self._waiting[0].request_id, places):
            return None
        request = self._waiting.popleft()
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return request

    def reserve(self, request: Request, places: int) -> bool:
        """Pages for a running request, taken from younger ones if need be.

        False where the request itself had to give its pages back.
        """
        while not self.pages.reserve(request.request_id, places):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def abort(self, request_id: str) -> bool:
        """Forget a request at once, wherever it is; False where it is not known (any more)."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._finish(request, "abort")
                return True
        for request in self.running:
            if request.request_id == request_id:
                self.retire(request, "abort")
                return True
        return False

    def retire(self, request: Request, reason: FinishReason) -> None:
        """A running request has ended."""
        self._release(request)
        self._finish(request, reason)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_cached = 0
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pages.release(request.request_id)
        self._free_slots.append(held_slot(request))
        request.slot = None
        self.running.remove(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._ids.discard(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason


def held_slot(request: Request) -> int:
    """The slot of a running request."""
    assert request.slot is not None, "a running request holds a slot"
    return request.slot
