"""Offline use in one process: text in, text out, no Ray. For notebooks, evaluations and tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import torch

from kdray.config import EngineConfig
from kdray.core.request import Request, SamplingParams
from kdray.driver.driver import Driver
from kdray.driver.scheduler import RequestOutput
from kdray.engine import EngineFacts, build_engine, make_request, resolve
from kdray.errors import ConfigError, InvalidRequest
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import StopMatcher, StreamDecoder, Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]  # messages: role and content


@dataclass(slots=True, kw_only=True)
class Completion:
    """One finished request.

    accept_lengths   tokens gained by each speculative step (accepted drafts + 1)
    error            why, where finish_reason is "error"
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    accept_lengths: list[int] = field(default_factory=list)
    error: str | None = None


class LLM:
    """A model and its drafter in this process, on one device.

        with LLM(EngineConfig(model="demo")) as llm:
            [completion] = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

    A str prompt is encoded as plain text; chat() takes messages.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if config.tp != 1:
            raise ConfigError("LLM runs in one process: use jobs/generate.py for tp > 1")
        facts = resolve(config)
        torch.set_num_threads(facts.threads)
        self.tokenizer = Tokenizer.from_folder(facts.target, config.load_format)
        engine = build_engine(config, facts)
        self.facts: EngineFacts = engine.facts
        self.driver: Driver = engine.driver
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """All prompts to their ends; completions in the prompts' order.

        Raises InvalidRequest before anything runs where a prompt can never fit.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts is a list of prompts, not one string", param="prompts")
        requests = self._requests(prompts, sampling or SamplingParams())
        for request in requests:
            self.driver.scheduler.validate(request)
        writers = {r.request_id: _Writer(r, self.tokenizer) for r in requests}
        for request in requests:
            self.driver.submit(request)
        try:
            for output in self._outputs():
                writer = writers.get(output.request_id)
                if writer is not None and writer.write(output):
                    self.driver.abort(output.request_id)
        finally:  # nobody waits for what an error or Ctrl-C left
            for request_id in writers:
                self.driver.abort(request_id)
        return [writers[request.request_id].completion() for request in requests]

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_args: Any,
    ) -> list[Completion]:
        """The next message of every conversation, or of the one; each is a list of messages.

            llm.chat([{"role": "user", "content": "How much is 79 + 94?"}])

        template_args   further variables of the folder's chat template, such as thinking=False
        Raises InvalidRequest before anything runs where messages are wrong or can never fit.
        """
        if isinstance(conversations, str | Mapping):
            raise InvalidRequest("a conversation is a list of messages", param="messages")
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        each = cast("Sequence[Conversation]", [conversations] if is_one else conversations)
        prompts = [encode_chat(self.tokenizer, messages, **template_args) for messages in each]
        return self.generate(prompts, sampling)

    def close(self) -> None:
        self.driver.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        each = (
            itertools.repeat(sampling, len(prompts))
            if isinstance(sampling, SamplingParams)
            else sampling
        )
        return [
            make_request(
                f"llm-{next(self._ids)}",
                self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
                params,
                self.facts,
            )
            for prompt, params in zip(prompts, each, strict=True)
        ]

    def _outputs(self) -> Iterator[RequestOutput]:
        while (outputs := self.driver.step()) is not None:
            yield from outputs


class _Writer:
    """Turns one request's tokens into text and applies its stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopMatcher(request.sampling.stop)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._reason: str | None = None
        self._error: str | None = None

    def write(self, output: RequestOutput) -> bool:
        """True where a stop string ended the text and the request is to be aborted."""
        if self._reason is not None:
            return False
        self._token_ids.extend(output.token_ids)
        text = self._decoder.feed(list(output.token_ids))
        if output.finish_reason is not None:
            text += self._decoder.flush()
        emit, stopped = self._stops.feed(text)
        self._text.append(emit)
        if stopped:
            self._reason = "stop"
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._text.append(self._stops.flush())
            self._reason, self._error = output.finish_reason, output.error
        return False

    def completion(self) -> Completion:
        return Completion(
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self._reason or "abort",
            accept_lengths=self._request.accept_lengths,
            error=self._error,
        )
