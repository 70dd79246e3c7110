"""A conversation to the tokens the model was trained to continue.

The structure of a prompt (who speaks, where a turn ends) is made of special tokens. Only the
template may write those: whatever a message says, its text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdray.errors import InvalidRequest
from kdray.model.chat_template import render_template
from kdray.model.tokenizer import Tokenizer

_SPEAKERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_OTHERS = "<|im_system|>"
_MIDDLE, _END = "<|im_middle|>", "<|im_end|>"
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Special:
    """A special token in a prompt, by name."""

    name: str


Piece = Special | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message as checked: list content joined, absent content empty.

    extra   the other fields as the client sent them, for templates that read them
    """

    role: str
    content: str
    name: str | None
    extra: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        named = {} if self.name is None else {"name": self.name}
        return {**self.extra, "role": self.role, "content": self.content, **named}


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    **template_args: Any,
) -> list[int]:
    """The prompt's token ids, by the folder's own template or K2's where it has none.

    template_args   further variables of the folder's template, such as thinking=False; they may
                    come from a client as they are
    Raises InvalidRequest (param "messages") for messages that are wrong.
    """
    checked = check_messages(messages)
    if tokenizer.chat_template is None:
        return _encode_pieces(tokenizer, k2_pieces(checked, add_generation_prompt))
    asked = {**template_args, "messages": [message.fields for message in checked]}
    shielded, mark = _shield(asked, tokenizer)
    own = {**tokenizer.special_names, "add_generation_prompt": add_generation_prompt}
    return _encode_shielded(
        tokenizer, render_template(tokenizer.chat_template, shielded | own), mark
    )


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **template_args: Any,
) -> str:
    """The prompt as text to look at; to run it use encode_chat, which keeps content apart."""
    checked = check_messages(messages)
    if template is None:
        pieces = k2_pieces(checked, add_generation_prompt)
        return "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)
    variables = {
        **template_args,
        "messages": [message.fields for message in checked],
        "add_generation_prompt": add_generation_prompt,
    }
    return render_template(template, variables)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[ChatMessage, ...]:
    """Messages with a role and text; InvalidRequest names the one that is wrong."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise _wrong("messages must be a list of at least one message")
    return tuple(_check_message(i, message) for i, message in enumerate(messages))


def k2_pieces(messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[Piece]:
    """Kimi K2's template: speaker, name or role, <|im_middle|>, content, <|im_end|>; no line ends.

    Users and assistants have their own speaker tokens, all others share the system's.
    """
    pieces: list[Piece] = []
    for message in messages:
        speaker = _SPEAKERS.get(message.role, _OTHERS)
        name = message.role if message.name is None else message.name
        pieces += [Special(speaker), name, Special(_MIDDLE), _k2_content(message), Special(_END)]
    if add_generation_prompt:
        pieces += [Special(_SPEAKERS["assistant"]), "assistant", Special(_MIDDLE)]
    return pieces


def _k2_content(message: ChatMessage) -> str:
    if message.extra.get("tool_calls"):
        raise _wrong("tool_calls need a model folder with a chat template of its own")
    call_id = message.extra.get("tool_call_id")
    if message.role == "tool" and isinstance(call_id, str):
        return f"## Return of {call_id}\n{message.content}"
    return message.content


def _encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, Special):
            ids.append(tokenizer.special_id(piece.name))
        else:
            ids += tokenizer.encode(piece)
    return ids


def _shield(asked: dict[str, Any], tokenizer: Tokenizer) -> tuple[dict[str, Any], str]:
    """What the client sent with every special token's name broken up by a mark, and the mark.

    The template still sees the text itself (to trim it, to split it), but what a client wrote no
    longer spells a special token. The mark is a character the client did not use.
    """
    try:
        used = set().union(*_strings(asked))
        mark = next((c for c in map(chr, _PRIVATE_USE) if c not in used), None)
        if mark is None:
            raise _wrong("the messages use every private-use character; leave one of them out")
        pattern, put = tokenizer.special_pattern, partial(_break_up, mark)
        broken = _map_strings(asked, lambda text: pattern.sub(put, text))
    except RecursionError:
        raise _wrong("the messages are nested too deeply") from None
    return broken, mark


def _break_up(mark: str, match: re.Match[str]) -> str:
    name = match.group()
    return name[:1] + mark + name[1:]


def _encode_shielded(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Special tokens where the template wrote them; the mark taken out of the rest."""
    ids: list[int] = []
    start = 0
    for match in tokenizer.special_pattern.finditer(text):
        ids += tokenizer.encode(text[start : match.start()].replace(mark, ""))
        ids.append(tokenizer.special_id(match.group()))
        start = match.end()
    return ids + tokenizer.encode(text[start:].replace(mark, ""))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(inner, change) for inner in value]
    return value


def _check_message(index: int, message: Any) -> ChatMessage:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} must be an object with role and content")
    role, name = message.get("role"), message.get("name")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where} needs a role, such as user")
    if name is not None and not isinstance(name, str):
        raise _wrong(f"{where}.name must be a string")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    extra = {k: v for k, v in message.items() if k not in ("role", "name", "content")}
    return ChatMessage(role=role, content=_text(where, content), name=name or None, extra=extra)


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content must be a string or a list of text parts")
    return "".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise _wrong(f"{where} must be a text part; {kind or type(part).__name__} is not served")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text must be a string")
    return text


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
