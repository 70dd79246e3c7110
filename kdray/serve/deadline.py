"""How long a request may take: the server's limit, or a shorter one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kdray.serve.failure import Failure, Refused


class Deadline:
    """Begins to run when it is made; None: never ends."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @classmethod
    def of(cls, asked: float | None, most: float | None) -> Deadline:
        """The shorter of a request's own and the server's."""
        return cls(min((s for s in (asked, most) if s is not None), default=None))

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[None]:
        """What runs inside is cancelled at the deadline, and Refused raised, with 408."""
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refused(
                Failure(
                    status=408,
                    message=f"the request was not done within {self._seconds:g} seconds",
                    kind="timeout_error",
                    code="deadline_exceeded",
                )
            ) from None
