"""A driver actor's interface over scripts: the same class in process and as a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from kdray.core.request import SamplingParams
from kdray.errors import InvalidRequest, RankFailed
from tests.serve.fakes import IM_END, MAX_MODEL_LEN, STATS, VOCAB_SIZE

StepMessage = list[tuple[str, tuple[int, ...], int | None, str | None, str | None]]
FOREVER, REFUSED, FATAL = b"forever", b"refused", b"fatal"


class ScriptedDriver:
    """Answers a prompt with itself, two tokens a step; some prompts behave in their own way."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[StepMessage | Exception] = asyncio.Queue()
        self._aborted: list[str] = []
        self._endless = 0

    async def info(self) -> dict[str, Any]:
        return {
            "name": "scripted",
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": VOCAB_SIZE,
            "end_token_ids": [IM_END],
            "mode": "tree",
            "budget": 16,
            "ranks": 1,
            "pid": 1,
        }

    async def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        delivered: tuple[int, ...] = (),
    ) -> None:
        assert sampling.max_tokens >= 1
        match bytes(prompt):
            case b"refused":
                raise InvalidRequest("it can never run", param="prompt")
            case b"fatal":
                self._messages.put_nowait(RankFailed("rank 1 died"))
            case b"forever":
                self._endless += 1
                self._messages.put_nowait([(request_id, prompt[:1], None, None, None)])
            case _:
                self._answer(request_id, prompt)

    async def abort(self, request_id: str) -> None:
        self._aborted.append(request_id)

    async def endless(self) -> int:
        """Requests that came and will not end by themselves."""
        return self._endless

    async def aborted(self) -> list[str]:
        return self._aborted

    async def stats(self) -> dict[str, Any]:
        return asdict(STATS)

    async def outputs(self) -> AsyncIterator[StepMessage]:
        yield []
        while True:
            message = await self._messages.get()
            if isinstance(message, Exception):
                raise message
            yield message

    def _answer(self, request_id: str, prompt: tuple[int, ...]) -> None:
        """One message a step, with a part for a request that nobody knows any more."""
        for start in range(0, len(prompt), 2):
            tokens = prompt[start : start + 2]
            reason = "length" if start + 2 >= len(prompt) else None
            accept_length = len(tokens) if start else None
            stale = ("aborted-before", tokens, 2, None, None)
            self._messages.put_nowait([stale, (request_id, tokens, accept_length, reason, None)])
