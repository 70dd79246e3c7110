"""A driver actor without a model, which steps at a fixed pace and notes when: to time the rest.

Its face is kdray.actors.driver_actor.DriverActor's, as far as endpoints use it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from kdray.core.request import SamplingParams
from kdray.driver.step_loop import DriverStats

StepMessage = list[tuple[str, tuple[int, ...], int | None, str | None, str | None]]
TOKENS_A_STEP = 4


class PacedDriver:
    """Every open request gains the same few tokens at every step, until its max_tokens."""

    def __init__(self, step_s: float, vocab_size: int) -> None:
        self._step_s = step_s
        self._vocab_size = vocab_size
        self._left: dict[str, int] = {}
        self._emitted: dict[str, list[float]] = {}
        self._subscribers: set[asyncio.Queue[StepMessage]] = set()
        self._steps = 0
        self._stepping: asyncio.Task[None] | None = None

    async def info(self) -> dict[str, Any]:
        return {
            "name": "paced",
            "max_model_len": 1 << 20,
            "vocab_size": self._vocab_size,
            "end_token_ids": [],
            "mode": "tree",
            "budget": 16,
            "ranks": 1,
            "pid": os.getpid(),
        }

    async def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        delivered: tuple[int, ...] = (),
    ) -> None:
        self._left[request_id] = sampling.max_tokens
        self._emitted[request_id] = []
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._run())

    async def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    async def stats(self) -> dict[str, Any]:
        return asdict(DriverStats(running=len(self._left), steps=self._steps))

    async def outputs(self) -> AsyncIterator[StepMessage]:
        messages: asyncio.Queue[StepMessage] = asyncio.Queue()
        self._subscribers.add(messages)
        try:
            yield []  # as the driver's: from now on
            while True:
                yield await messages.get()
        finally:
            self._subscribers.discard(messages)

    async def emissions(self) -> dict[str, list[float]]:
        """When each step of each request was handed to the streams (time.perf_counter, seconds);
        forgets them."""
        emitted, self._emitted = self._emitted, {}
        return emitted

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._step_s, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            if self._left:
                self._step()

    def _step(self) -> None:
        message = [self._gain(request_id) for request_id in tuple(self._left)]
        self._steps += 1
        now = time.perf_counter()
        for request_id, *_ in message:
            self._emitted[request_id].append(now)
        for subscriber in self._subscribers:
            subscriber.put_nowait(message)

    def _gain(self, request_id: str) -> tuple[str, tuple[int, ...], int, str | None, None]:
        gained = min(TOKENS_A_STEP, self._left[request_id])
        self._left[request_id] -= gained
        reason = None if self._left[request_id] else "length"
        if reason is not None:
            del self._left[request_id]
        return request_id, tuple(range(300, 300 + gained)), gained, reason, None
