"""An OpenAI request body to frozen dataclasses; whatever cannot be honoured is refused by name.

Unknown members are ignored, null means absent. Members that would change the output and are not
supported are refused (`_REFUSED`), never dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdray.core.request import SamplingParams
from kdray.errors import InvalidRequest
from kdray.serve.fields import Fields, is_integer, is_number, parse_object

MAX_TOKENS = 2**31 - 1
MAX_TIMEOUT_S = 86_400
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What chat and text completions have in common.

    model        the model's name as the client wrote it; None: the one that is served
    choices      outputs wanted for each prompt
    max_tokens   None: up to the model's length; `max_tokens_name` is the member that said so
    sampling     its max_tokens is only an upper bound where max_tokens is None
    timeout_s    seconds the client gives it; None: as long as the server does
    """

    model: str | None
    choices: int
    max_tokens: int | None
    max_tokens_name: str
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One conversation; `template` are the extra arguments of the chat template."""

    options: Options
    messages: list[dict[str, Any]]
    template: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One or more prompts, as text or as token ids."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


def parse_chat(raw: bytes, *, vocab_size: int) -> ChatRequest:
    fields = parse_object(raw)
    messages = fields.items("messages")
    if not messages or not all(isinstance(message, dict) for message in messages):
        fields.refuse("messages", "a list of at least one message object")
    return ChatRequest(
        options=_options(fields, vocab_size),
        messages=messages,  # type: ignore[arg-type]  # every one is a dict, checked above
        template=dict(fields.nested("chat_template_kwargs").members()),
    )


def parse_completion(raw: bytes, *, vocab_size: int) -> CompletionRequest:
    fields = parse_object(raw)
    return CompletionRequest(
        options=_options(fields, vocab_size),
        prompts=_prompts(fields, vocab_size),
        echo=fields.flag("echo", False),
    )


def _options(fields: Fields, vocab_size: int) -> Options:
    _refuse_unsupported(fields)
    name, max_tokens = _max_tokens(fields)
    choices = fields.integer("n", 1)
    if choices < 1:
        fields.refuse("n", "at least 1")
    if fields.integer("best_of", choices) != choices:
        raise InvalidRequest("best_of other than n is not supported", param="best_of")
    stream = fields.nested("stream_options")
    return Options(
        model=fields.text("model", None),
        choices=choices,
        max_tokens=max_tokens,
        max_tokens_name=name,
        sampling=_sampling(fields, max_tokens, vocab_size),
        stream=fields.flag("stream", False),
        include_usage=stream.flag("include_usage", False),
        continuous_usage=stream.flag("continuous_usage_stats", False),
        timeout_s=_timeout(fields),
    )


def _timeout(fields: Fields) -> float | None:
    seconds = fields.number("timeout_s", None)
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        fields.refuse("timeout_s", f"a number above 0, up to {MAX_TIMEOUT_S}")
    return seconds


def _max_tokens(fields: Fields) -> tuple[str, int | None]:
    """The newer member wins where both are given."""
    older = fields.integer("max_tokens", None)
    newer = fields.integer("max_completion_tokens", None)
    name, value = "max_tokens", older
    if newer is not None:
        name, value = "max_completion_tokens", newer
    if value is not None and not 1 <= value <= MAX_TOKENS:
        fields.refuse(name, f"from 1 to {MAX_TOKENS}")
    return name, value


def _sampling(fields: Fields, max_tokens: int | None, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        min_tokens=fields.integer("min_tokens", 0),
        temperature=fields.number("temperature", 1.0),
        top_k=_top_k(fields),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(fields, vocab_size),
        seed=fields.integer("seed", None),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
        ignore_eos=fields.flag("ignore_eos", False),
    )


def _top_k(fields: Fields) -> int:
    """-1 is what several clients send for "all"; SamplingParams says 0."""
    top_k = fields.integer("top_k", 0)
    return 0 if top_k == -1 else top_k


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    strings = [value] if isinstance(value, str) else fields.items("stop")
    if len(strings) > MAX_STOPS:
        fields.refuse("stop", f"at most {MAX_STOPS} strings")
    stops = tuple(text for text in strings if isinstance(text, str))
    if len(stops) < len(strings) or not all(1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        fields.refuse("stop", f"a string or a list of strings, of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.items("stop_token_ids")
    if len(ids) > MAX_STOP_TOKENS:
        fields.refuse("stop_token_ids", f"at most {MAX_STOP_TOKENS} token ids")
    return _token_ids(fields, "stop_token_ids", ids, vocab_size)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    members = fields.nested("logit_bias").members()
    if len(members) > MAX_BIASED_TOKENS:
        fields.refuse("logit_bias", f"an object of at most {MAX_BIASED_TOKENS} tokens")
    bias = {}
    for key, value in members.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else vocab_size
        if token >= vocab_size or not is_number(value):
            wanted = f"an object from token ids below {vocab_size} to numbers"
            raise InvalidRequest(f"logit_bias must be {wanted}", param="logit_bias")
        bias[token] = float(value)
    return tuple(sorted(bias.items()))


def _prompts(fields: Fields, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    """One string, one list of token ids, or a list of either."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return (value,)
    items = fields.items("prompt")
    if not items:
        fields.refuse("prompt", "a string, a list of token ids, or a list of these")
    if is_integer(items[0]):
        return (_token_ids(fields, "prompt", items, vocab_size),)
    return tuple(_prompt(fields, item, vocab_size) for item in items)


def _prompt(fields: Fields, item: object, vocab_size: int) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(fields, "prompt", item, vocab_size)
    return fields.refuse("prompt", "a string, a list of token ids, or a list of these")


def _token_ids(fields: Fields, name: str, ids: list[object], vocab_size: int) -> tuple[int, ...]:
    tokens = tuple(token for token in ids if is_integer(token) and 0 <= token < vocab_size)
    if len(tokens) < len(ids):
        fields.refuse(name, f"token ids from 0 to {vocab_size - 1}")
    return tokens


# Members that would change the output, with the values at which they change nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "suffix": ("",),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "stop_regex": ([], ""),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def _refuse_unsupported(fields: Fields) -> None:
    for name, neutral in _REFUSED.items():
        value = fields.raw(name)
        # 0 == False in Python, yet "logprobs": 0 asks for something and false does not.
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            continue
        raise InvalidRequest(f"{name} is not supported; leave it out", param=name)
