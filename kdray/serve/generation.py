"""All choices of one HTTP request, from submit to finish or abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

from kdray.core.request import SamplingParams
from kdray.errors import InvalidRequest, KdrayError
from kdray.model.tokenizer import Tokenizer
from kdray.serve.engine import EngineClient
from kdray.serve.failure import ClientLeft, GenerationFailed
from kdray.serve.openai import Options
from kdray.serve.text import ChoiceStep, ChoiceText


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output to make: what goes to the engine as one request."""

    index: int
    prompt: tuple[int, ...]
    sampling: SamplingParams


def plan_choices(
    prompts: Sequence[tuple[int, ...]],
    options: Options,
    *,
    max_model_len: int,
    end_token_ids: Iterable[int] = (),
) -> tuple[Choice, ...]:
    """`options.choices` outputs for each prompt, in OpenAI's order.

    Output i of a prompt draws with seed + i, so a prompt gives the same alone as among others.
    `end_token_ids`, such as the token that ends a turn, end an output unless ignore_eos.
    """
    ends = () if options.sampling.ignore_eos else tuple(sorted(end_token_ids))
    samplings = [_fit(len(prompt), options, max_model_len, ends) for prompt in prompts]
    return tuple(
        Choice(
            index=p * options.choices + i,
            prompt=prompt,
            sampling=_reseeded(samplings[p], i),
        )
        for p, prompt in enumerate(prompts)
        for i in range(options.choices)
    )


def _fit(
    num_prompt: int, options: Options, max_model_len: int, ends: tuple[int, ...]
) -> SamplingParams:
    """The sampling with its limits resolved; InvalidRequest where it cannot fit."""
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    room = max_model_len - num_prompt
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens; with its output it must fit {max_model_len}",
            param="prompt",
        )
    max_tokens = room if options.max_tokens is None else options.max_tokens
    if max_tokens > room:
        name = options.max_tokens_name
        raise InvalidRequest(
            f"{num_prompt} prompt tokens and {name} {max_tokens} exceed the model's "
            f"{max_model_len} tokens; ask for at most {room}",
            param=name,
        )
    stop_token_ids = (*options.sampling.stop_token_ids, *ends)
    return replace(options.sampling, max_tokens=max_tokens, stop_token_ids=stop_token_ids)


def _reseeded(sampling: SamplingParams, i: int) -> SamplingParams:
    if sampling.seed is None or i == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + i)


@dataclass(slots=True, eq=False)
class Progress:
    """How far one choice has come; times in seconds of time.perf_counter.

    num_first        tokens of its first step
    accept_lengths   one per speculative step
    outcome          "stop", "length", "error" or "abort" at its end
    """

    num_tokens: int = 0
    num_first: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    first_at: float | None = None
    last_at: float | None = None
    outcome: str | None = None

    def add(self, step: ChoiceStep) -> None:
        now = time.perf_counter()
        if step.num_tokens and self.first_at is None:
            self.first_at, self.num_first = now, step.num_tokens
        self.last_at = now
        self.num_tokens += step.num_tokens
        if step.accept_length is not None:
            self.accept_lengths.append(step.accept_length)
        self.outcome = step.finish_reason


class Observer(Protocol):
    """Told how a request gets on.

    started   it goes to the engine
    began     a choice has its first token
    stepped   a choice has more
    ended     nothing of it runs any more; told once, whatever ended it
    """

    def started(self, generation: Generation) -> None: ...

    def began(self, choice: Choice) -> None: ...

    def stepped(self, step: ChoiceStep) -> None: ...

    def ended(self, generation: Generation) -> None: ...


class Generation:
    """Entered, it submits every choice; iterated, it yields their steps; left, nothing of it runs.

    Whatever ends it (a finish, an error, a client that left), every engine request that has not
    finished by itself is aborted exactly once.

    started_at   time.perf_counter when it came in
    """

    def __init__(
        self,
        *,
        engine: EngineClient,
        tokenizer: Tokenizer,
        request_id: str,
        choices: Sequence[Choice],
        observers: Sequence[Observer],
    ) -> None:
        self.request_id = request_id
        self.choices = tuple(choices)
        self.progress = tuple(Progress() for _ in choices)
        self._engine = engine
        self._texts = [ChoiceText(c.index, tokenizer, c.sampling) for c in choices]
        self._observers = tuple(observers)
        self.started_at = time.perf_counter()
        self._open: set[str] = set()
        self._readers: list[asyncio.Task[None]] = []
        self._steps: asyncio.Queue[ChoiceStep | Exception] = asyncio.Queue()

    @property
    def seconds(self) -> float:
        """Since it came in."""
        return time.perf_counter() - self.started_at

    async def __aenter__(self) -> Generation:
        for observer in self._observers:
            observer.started(self)
        try:
            await self._submit_all()
        except BaseException as error:
            await self._close(_outcome(error))
            raise
        self._readers = [asyncio.create_task(self._read(choice)) for choice in self.choices]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._close(_outcome(error))

    async def __aiter__(self) -> AsyncIterator[ChoiceStep]:
        """Steps of all choices as they come; GenerationFailed where the engine gives one up."""
        unfinished = len(self.choices)
        while unfinished:
            step = await self._steps.get()
            if isinstance(step, Exception):
                raise step
            self._count(step)
            unfinished -= step.finish_reason is not None
            yield step

    def _count(self, step: ChoiceStep) -> None:
        progress = self.progress[step.index]
        was_waiting = progress.first_at is None
        progress.add(step)
        for observer in self._observers:
            if was_waiting and progress.first_at is not None:
                observer.began(self.choices[step.index])
            observer.stepped(step)

    async def _submit_all(self) -> None:
        """In order, but without waiting for one answer before the next call."""
        calls = map(self._submit, self.choices)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _submit(self, choice: Choice) -> None:
        name = self._name(choice)
        self._open.add(name)  # first: a call that is cancelled may still have reached the engine
        try:
            await self._engine.submit(name, list(choice.prompt), choice.sampling)
        except KdrayError:  # refused: nothing was queued
            self._open.discard(name)
            raise

    async def _read(self, choice: Choice) -> None:
        try:
            async for step in self._steps_of(choice):
                self._steps.put_nowait(step)
        except Exception as error:
            self._steps.put_nowait(error)

    async def _steps_of(self, choice: Choice) -> AsyncIterator[ChoiceStep]:
        name = self._name(choice)
        text = self._texts[choice.index]
        async for delta in self._engine.outputs(name):
            if delta.finish_reason is not None:
                self._open.discard(name)
            if delta.finish_reason == "error":
                raise GenerationFailed(delta.error or "the engine gave no reason")
            step = text.feed(delta)
            if step.finish_reason is not None:
                await self._abort(name)  # a stop string: the engine would run on
                yield step
                return
            yield step
        raise GenerationFailed("the engine's output ended before the request did")

    async def _close(self, outcome: str) -> None:
        for progress in self.progress:
            progress.outcome = progress.outcome or outcome
        for observer in self._observers:
            observer.ended(self)
        for reader in self._readers:
            reader.cancel()
        # Shielded here and in _abort: cancelling the clean-up must not leave a request running.
        await asyncio.shield(asyncio.gather(*map(self._abort, tuple(self._open))))

    async def _abort(self, name: str) -> None:
        if name in self._open:
            self._open.discard(name)
            with suppress(KdrayError):  # an engine that is gone runs nothing
                await asyncio.shield(self._engine.abort(name))

    def _name(self, choice: Choice) -> str:
        return f"{self.request_id}-{choice.index}"


def _outcome(error: BaseException | None) -> str:
    """What became of the choices that have not finished when `error` ended them."""
    failed = isinstance(error, Exception) and not isinstance(error, ClientLeft)
    return "error" if failed else "abort"
