"""A client of OpenAI's wire format that notes when what arrived: of kdray, SGLang or vLLM."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kdray.errors import KdrayError

Json = dict[str, Any]
_CHUNK_LIMIT = 4 << 20  # bytes of one line


@dataclass(slots=True)
class Timing:
    """One request; times in seconds of time.perf_counter.

    due       when it was to be sent: queueing in this client counts as waiting
    first     its first text; first_tokens came with it
    tokens    as the server's usage says; else one a chunk of text
    error     None, or its kind: "429", "500", "timeout", "connection", "stream"
    detail    what the server said of it
    """

    due: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    first_tokens: int = 1
    error: str | None = None
    detail: str = ""

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first is None else 1000 * (self.first - self.due)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token, behind the first chunk's."""
        later = self.tokens - self.first_tokens
        if self.first is None or self.last is None or later < 1:
            return None
        return 1000 * (self.last - self.first) / later

    @property
    def stream_tokens_per_s(self) -> float | None:
        if self.last is None or self.last <= self.due:
            return None
        return self.tokens / (self.last - self.due)


@dataclass(slots=True)
class Service:
    """A server under test; `model` is known once check() has asked for it, and what a kdray's says
    of how it runs."""

    session: aiohttp.ClientSession
    url: str
    model: str | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    says: Json = field(default_factory=dict)

    async def check(self) -> None:
        """Its health, its model, and one whole answer. Raises KdrayError with what is amiss."""
        try:
            await self._check_health()
            if self.model is None:
                card = (await self._get_json("/v1/models"))["data"][0]
                self.model, self.says = card["id"], card.get("kdray") or {}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError) as error:
            raise KdrayError(
                f"{self.url} does not answer as OpenAI's servers do: "
                f"{type(error).__name__}: {error}"
            ) from None
        message = {"role": "user", "content": "Hello"}
        timing = await self.ask(
            "/v1/chat/completions", {"messages": [message], "max_tokens": 8}, time.perf_counter()
        )
        if timing.error is not None:
            raise KdrayError(f"{self.url}: a first request failed ({timing.error}) {timing.detail}")

    async def ask(self, path: str, body: Json, due: float) -> Timing:
        """One streamed request."""
        timing = Timing(due=due)
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"model": self.model, "stream": True, "stream_options": options} | body
        try:
            async with self.session.post(self.url + path, json=asked) as response:
                if response.status != 200:
                    timing.error = str(response.status)
                    timing.detail = (await response.text())[:300]
                    return timing
                async for line in response.content:
                    _read(line, timing)
        except TimeoutError:
            timing.error = "timeout"
        except (aiohttp.ClientError, OSError):
            timing.error = "connection"
        if timing.error is None and timing.first is None:
            timing.error = "stream"
        return timing

    async def metrics(self) -> dict[str, float]:
        """Its Prometheus page, values added up over labels; empty where there is none."""
        try:
            async with self.session.get(self.url + "/metrics") as response:
                return parse_metrics(await response.text()) if response.status == 200 else {}
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeError):
            return {}

    async def _check_health(self) -> None:
        async with self.session.get(self.url + "/health") as response:
            if response.status >= 400 and response.status != 404:  # some servers have no such page
                raise KdrayError(f"{self.url}/health says {response.status}: not ready")

    async def _get_json(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            if response.status in (401, 403):
                raise KdrayError(f"{self.url} wants a key: set OPENAI_API_KEY")
            response.raise_for_status()
            return await response.json()


@asynccontextmanager
async def service(
    url: str, *, model: str | None, key: str | None, timeout_s: float
) -> AsyncIterator[Service]:
    """A client with as many connections as it has requests; `url` without /v1."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=_CHUNK_LIMIT,
    ) as session:
        yield Service(session, url.rstrip("/").removesuffix("/v1"), model)


def parse_metrics(page: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", page, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def accept_length(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Mean accept length, bonus token included, between two looks at a server's metrics; by the
    names of kdray, vLLM or SGLang. None where it has none, or nothing was drafted."""

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if steps := gained("kdray_accept_length_count"):
        return gained("kdray_accept_length_sum") / steps
    if drafts := gained("vllm:spec_decode_num_drafts_total"):
        return 1 + gained("vllm:spec_decode_num_accepted_tokens_total") / drafts
    return after.get("sglang:spec_accept_length")


def _read(line: bytes, timing: Timing) -> None:
    """One line of a stream of events."""
    data = line.strip().removeprefix(b"data:").strip()
    if not data.startswith(b"{"):
        return  # a comment, an empty line, [DONE]
    now = time.perf_counter()
    chunk = json.loads(data)
    if "error" in chunk:
        timing.error, timing.detail = "stream", str(chunk["error"])[:300]
        return
    usage = chunk.get("usage") or {}
    if any(map(_text, chunk.get("choices", ()))):
        timing.last = now
        timing.tokens += 1
        if timing.first is None:
            timing.first = now
            timing.first_tokens = usage.get("completion_tokens", 1)
    timing.tokens = usage.get("completion_tokens", timing.tokens)


def _text(choice: Json) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or ""
