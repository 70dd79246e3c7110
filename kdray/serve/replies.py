"""Frozen dataclasses and steps to OpenAI's response objects, for chat and for text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kdray.serve.engine import EngineInfo
from kdray.serve.generation import Generation, Progress
from kdray.serve.openai import Options
from kdray.serve.text import ChoiceStep

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One request's answer in the making.

    kind      which endpoint's objects
    model     the served name
    created   seconds since the epoch
    echoes    text before each choice's own, by index; empty without `echo`
    """

    kind: Literal["chat", "text"]
    model: str
    created: int
    options: Options
    echoes: Sequence[str]

    async def whole(self, generation: Generation) -> Json:
        """The object of a request without `stream`."""
        texts = list(self.echoes)
        async for step in generation:
            texts[step.index] += step.text
        choices = [
            self._choice(index, self._content(texts[index]), progress.outcome)
            for index, progress in enumerate(generation.progress)
        ]
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._object(generation, name, choices) | {"usage": self._usage(generation)}

    async def chunks(self, generation: Generation) -> AsyncIterator[Json]:
        """One chunk a step, one for each finish, and the usage where it was asked for."""
        opened: set[int] = set()
        async for step in generation:
            if step.index not in opened:
                opened.add(step.index)
                for opening in self._opening(step.index):
                    yield self._chunk(generation, opening)
            yield self._step(generation, step)
            if step.finish_reason is not None:
                nothing: Json = {"delta": {}} if self.kind == "chat" else {"text": ""}
                yield self._chunk(generation, self._choice(step.index, nothing, step.finish_reason))
        if self.options.include_usage:
            last = self._object(generation, self._chunk_name, [])
            yield last | {"usage": self._usage(generation)}

    def _opening(self, index: int) -> list[Json]:
        """What precedes a choice's own text: the role in a chat, the prompt where it is echoed."""
        if self.kind == "chat":
            return [self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)]
        echo = self.echoes[index]
        return [self._choice(index, {"text": echo}, None)] if echo else []

    def _step(self, generation: Generation, step: ChoiceStep) -> Json:
        content = {"delta": {"content": step.text}} if self.kind == "chat" else {"text": step.text}
        chunk = self._chunk(generation, self._choice(step.index, content, None))
        if step.accept_length is not None:
            chunk["kdray"] = {"accept_length": step.accept_length}
        return chunk

    def _chunk(self, generation: Generation, choice: Json) -> Json:
        chunk = self._object(generation, self._chunk_name, [choice])
        if self.options.continuous_usage:
            chunk["usage"] = self._usage(generation)
        elif self.options.include_usage:
            chunk["usage"] = None
        return chunk

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _content(self, text: str) -> Json:
        if self.kind == "chat":
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def _choice(self, index: int, content: Json, finish_reason: str | None) -> Json:
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def _usage(self, generation: Generation) -> Json:
        """Token counts so far; a prompt counts once, however many outputs it has.

        The extension `kdray` gives the speculative steps taken and their mean accept length.
        """
        prompts = generation.choices[:: self.options.choices]
        prompt_tokens = sum(len(choice.prompt) for choice in prompts)
        completion_tokens = sum(progress.num_tokens for progress in generation.progress)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "kdray": _speculation(generation.progress),
        }

    def _object(self, generation: Generation, name: str, choices: list[Json]) -> Json:
        return {
            "id": generation.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _speculation(progress: Sequence[Progress]) -> Json:
    steps = sum(len(choice.accept_lengths) for choice in progress)
    accepted = sum(sum(choice.accept_lengths) for choice in progress)
    mean = round(accepted / steps, 4) if steps else None
    return {"accept_length_mean": mean, "steps": steps}


def model_card(name: str, created: int, info: EngineInfo) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kdray",
        "max_model_len": info.max_model_len,
        "kdray": {
            "mode": info.mode,
            "budget": info.budget,
            "ranks": info.ranks,
            "load_format": info.load_format,
            "synthetic_acceptance": info.synthetic_acceptance,
        },
    }
