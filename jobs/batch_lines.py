"""The lines of a batch: what stands in the input, what the endpoint is asked, what is written.

A line is {"prompt": TEXT}, {"messages": [..]}, or one of OpenAI's batch files: {"custom_id",
"method", "url", "body"}. The last kind is answered as OpenAI's batch output is, the others by their
own members and what came of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdray.errors import InvalidRequest, KdrayError
from kdray.model.chat import check_messages

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request.

    number      of the line in its file, or of the prompt on the command line, from 1
    source      the line's own members
    path, body  what the endpoint is asked
    custom_id   set where the line is OpenAI's
    """

    number: int
    source: Json
    path: str
    body: Json
    custom_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the endpoint said: its status and body, and the tokens of the first output."""

    status: int
    body: Json
    token_ids: Sequence[int] = ()

    @property
    def text(self) -> str:
        if self.status != 200:
            return ""
        choice = self.body["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    @property
    def error(self) -> str | None:
        return None if self.status == 200 else str(self.body["error"]["message"])


def read_lines(path: Path, options: Mapping[str, Any], *, raw: bool) -> list[Line]:
    """All lines of a file, checked; KdrayError with the number of the first that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise KdrayError(f"--input {path} cannot be read: {error}") from None
    # Not splitlines(): that would also break at characters which JSON strings may hold.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [_line(n, written, options, raw) for n, written in numbered if written.strip()]
    if not lines:
        raise KdrayError(f"--input {path} holds no prompts")
    _check_ids(lines)
    return lines


def prompt_lines(prompts: Sequence[str], options: Mapping[str, Any], *, raw: bool) -> list[Line]:
    """The prompts of a command line."""
    return [
        plain_line(n, {"prompt": prompt}, options, raw) for n, prompt in enumerate(prompts, start=1)
    ]


def plain_line(number: int, source: Json, options: Mapping[str, Any], raw: bool) -> Line:
    """Line n draws with seed + n - 1, so that equal prompts differ and a run can be repeated."""
    asked = dict(options) | {"seed": options["seed"] + number - 1}
    try:
        if raw and "messages" not in source:
            if not isinstance(source["prompt"], str) or not source["prompt"]:
                raise InvalidRequest("prompt must be a string, not empty where it is raw text")
            return Line(
                number=number, source=source, path=TEXT, body=asked | {"prompt": source["prompt"]}
            )
        messages = source.get("messages", [{"role": "user", "content": source.get("prompt")}])
        check_messages(messages)
    except InvalidRequest as error:
        raise KdrayError(f"line {number}: {error}") from None
    return Line(number=number, source=source, path=CHAT, body=asked | {"messages": messages})


def record_of(line: Line, answer: Answer) -> Json:
    """What is written for a line."""
    if line.custom_id is not None:
        request_id = str(answer.body.get("id", f"line-{line.number}"))
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        return {
            "id": f"batch_req_{line.number}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
    if answer.error is not None:
        return line.source | {"text": None, "finish_reason": None, "error": answer.error}
    return line.source | {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.body["choices"][0]["finish_reason"],
        "accept_length_mean": answer.body["usage"]["kdray"]["accept_length_mean"],
    }


def _line(number: int, written: str, options: Mapping[str, Any], raw: bool) -> Line:
    try:
        source = json.loads(written)
    except ValueError as error:
        raise KdrayError(f"line {number} is not JSON: {error}") from None
    if isinstance(source, dict) and "custom_id" in source:
        return _openai_line(number, source)
    if not isinstance(source, dict) or not ("prompt" in source or "messages" in source):
        raise KdrayError(f'line {number} needs a "prompt", "messages", or a "custom_id" and "body"')
    return plain_line(number, source, options, raw)


def _openai_line(number: int, source: Json) -> Line:
    body, wrong = source.get("body"), list(_wrong(source))
    if wrong:
        raise KdrayError(f"line {number}: {wrong[0]}")
    return Line(
        number=number,
        source=source,
        path=source["url"],
        body=dict(body or {}),
        custom_id=source["custom_id"],
    )


def _wrong(source: Json) -> Iterator[str]:
    if not isinstance(source["custom_id"], str):
        yield "custom_id must be a string"
    if source.get("method", "POST") != "POST":
        yield "method must be POST"
    if source.get("url") not in (CHAT, TEXT):
        yield f"url must be {CHAT} or {TEXT}"
    body = source.get("body")
    if not isinstance(body, dict):
        yield "body must be an object"
    elif body.get("stream"):
        yield "a batch cannot stream: leave out body.stream"


def _check_ids(lines: Sequence[Line]) -> None:
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id is None:
            continue
        first = seen.setdefault(line.custom_id, line.number)
        if first != line.number:
            raise KdrayError(
                f"line {line.number} has the custom_id {line.custom_id!r} of line {first}"
            )
