"""The endpoints of one served model."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from kdray.driver.step_loop import DriverStats
from kdray.errors import InvalidRequest
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import Tokenizer
from kdray.serve import admission, failure, metrics
from kdray.serve.admission import ServeLimits
from kdray.serve.deadline import Deadline
from kdray.serve.engine import EngineClient
from kdray.serve.failure import ClientLeft
from kdray.serve.families import CONTENT_TYPE, Family, as_text
from kdray.serve.generation import Generation, plan_choices
from kdray.serve.openai import (
    ChatRequest,
    CompletionRequest,
    Options,
    parse_chat,
    parse_completion,
)
from kdray.serve.replies import Json, Reply, model_card
from kdray.serve.request_log import RequestLog
from kdray.serve.streaming import EventStream, unless_client_leaves

log = logging.getLogger("kdray.serve")
STATS_TIMEOUT_S = 5.0
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """HTTP in, HTTP out; every error is raised and answered by the middleware."""

    engine: EngineClient
    tokenizer: Tokenizer
    name: str
    limits: ServeLimits
    created: int = field(default_factory=lambda: int(time.time()))
    counts: metrics.ServiceMetrics = field(default_factory=metrics.ServiceMetrics)

    async def chat(self, request: Request) -> Response:
        """A chat completion, whole or streamed."""
        raw = await self._body(request)
        ask = parse_chat(raw, vocab_size=self.engine.info.vocab_size)
        deadline = Deadline.of(ask.options.timeout_s, self.limits.deadline_s)
        self._admit(ask.options, num_prompts=1)
        prompt = await asyncio.to_thread(self._chat_prompt, ask)
        reply = self._reply("chat", ask.options, [""])
        return await self._answer(request, reply, [prompt], deadline)

    async def completion(self, request: Request) -> Response:
        """Text completions of one or more prompts, whole or streamed."""
        raw = await self._body(request)
        ask = parse_completion(raw, vocab_size=self.engine.info.vocab_size)
        deadline = Deadline.of(ask.options.timeout_s, self.limits.deadline_s)
        self._admit(ask.options, num_prompts=len(ask.prompts))
        prompts = await asyncio.to_thread(self._text_prompts, ask)
        echoes = self._echoes(ask) if ask.echo else [""] * len(prompts)
        reply = self._reply("text", ask.options, echoes)
        return await self._answer(request, reply, prompts, deadline)

    async def models(self) -> Json:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model: str) -> Json:
        if model != self.name:
            raise failure.model_not_found(model, self.name)
        return self._card()

    async def health(self) -> Json:
        self._check_engine()
        return {"status": "ok"}

    async def metrics_page(self) -> Response:
        page = as_text(await self.families())
        return Response(page, media_type=CONTENT_TYPE)

    async def families(self) -> Sequence[Family]:
        """All metrics, of the surface and of its engine."""
        stats = await self._stats()
        return list(metrics.families(self.counts, stats, self.engine.events.totals()))

    async def version(self) -> Json:
        return {"version": package_version("kdray"), "ray": package_version("ray")}

    async def _body(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise failure.body_too_large(limit)
        except ClientDisconnect:
            raise ClientLeft from None
        return bytes(body)

    def _admit(self, options: Options, *, num_prompts: int) -> None:
        """Refuse what needs no tokens to be refused."""
        if options.model not in (None, self.name):
            raise failure.model_not_found(str(options.model), self.name)
        num_choices = num_prompts * options.choices
        param = "n" if options.choices > 1 else "prompt"
        admission.check_choices(num_choices, self.limits, param=param)
        self._check_engine()
        admission.check_room(num_choices, self.limits, self.counts)

    def _check_engine(self) -> None:
        cause = self.engine.healthy()
        if cause is not None:
            raise failure.unavailable(cause)

    def _chat_prompt(self, ask: ChatRequest) -> Tokens:
        self._check_length(_content_bytes(ask.messages), "messages")
        return tuple(encode_chat(self.tokenizer, ask.messages, **ask.template))

    def _text_prompts(self, ask: CompletionRequest) -> list[Tokens]:
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt.encode()), "prompt")
        return [
            tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
            for prompt in ask.prompts
        ]

    def _check_length(self, num_bytes: int, param: str) -> None:
        """Refuse a text that no tokenizing can make fit, before it costs any."""
        least = num_bytes // self.tokenizer.longest_token
        most = self.engine.info.max_model_len
        if least > most:
            raise InvalidRequest(
                f"a text of {num_bytes} bytes has at least {least} tokens; the model takes {most}",
                param=param,
            )

    def _echoes(self, ask: CompletionRequest) -> list[str]:
        """Each choice's prompt as text."""
        return [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            for prompt in ask.prompts
        ]

    def _reply(
        self, kind: Literal["chat", "text"], options: Options, echoes: Sequence[str]
    ) -> Reply:
        return Reply(
            kind=kind,
            model=self.name,
            created=int(time.time()),
            options=options,
            echoes=[echo for echo in echoes for _ in range(options.choices)],
        )

    async def _answer(
        self, request: Request, reply: Reply, prompts: Sequence[Tokens], deadline: Deadline
    ) -> Response:
        prefix = "chatcmpl" if reply.kind == "chat" else "cmpl"
        choices = plan_choices(
            prompts,
            reply.options,
            max_model_len=self.engine.info.max_model_len,
            end_token_ids=self.tokenizer.end_token_ids,
        )
        admission.check_tokens(choices, self.limits, self.counts)
        generation = Generation(
            engine=self.engine,
            tokenizer=self.tokenizer,
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            choices=choices,
            observers=(self.counts, RequestLog()),
        )
        if reply.options.stream:
            refused = self.counts.refused
            return EventStream(generation, reply.chunks, deadline=deadline, refused=refused)
        whole = _whole(reply, generation, deadline)
        return JSONResponse(await unless_client_leaves(request.receive, whole))

    async def _stats(self) -> DriverStats | None:
        """None where the engine does not answer: the page is wanted most when it is down."""
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await self.engine.stats()
        except Exception as error:
            log.warning("no stats from the engine: %s", error)
            return None

    def _card(self) -> Json:
        return model_card(self.name, self.created, self.engine.info)


async def _whole(reply: Reply, generation: Generation, deadline: Deadline) -> Json:
    async with deadline.scope(), generation:
        return await reply.whole(generation)


def _content_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """Of the plain contents alone: a lower bound."""
    contents = (message.get("content") for message in messages)
    return sum(len(content.encode()) for content in contents if isinstance(content, str))


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
