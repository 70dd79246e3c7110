"""What /openapi.json says about bodies and errors. Documentation: the checks are in openai.py."""

from __future__ import annotations

from typing import Any

from kdray.core.profile import ACTIVITIES, MAX_STEPS
from kdray.serve.openai import (
    MAX_BIASED_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TIMEOUT_S,
)

Json = dict[str, Any]

_NULLABLE_TEXT: Json = {"type": ["string", "null"]}
_FLAG: Json = {"type": ["boolean", "null"]}
_COUNT: Json = {"type": ["integer", "null"], "minimum": 1}
_STRINGS: Json = {"type": "array", "items": {"type": "string"}}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TOKENS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _number(low: float, high: float) -> Json:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


_SHARED: Json = {
    "model": _NULLABLE_TEXT,
    "n": _COUNT,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": {"type": ["integer", "null"], "minimum": 0},
    "temperature": _number(0, 100),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1},
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "logit_bias": {
        "type": ["object", "null"],
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASED_TOKENS,
    },
    "seed": {"type": ["integer", "null"], "minimum": 0},
    "stop": {
        "oneOf": [
            _STOP,
            {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            {"type": "null"},
        ]
    },
    "stop_token_ids": {**_TOKENS, "type": ["array", "null"], "maxItems": MAX_STOP_TOKENS},
    "ignore_eos": _FLAG,
    "timeout_s": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "maximum": MAX_TIMEOUT_S,
    },
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
}

_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string"},
        "content": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
_CHAT: Json = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "chat_template_kwargs": {"type": ["object", "null"]},
        **_SHARED,
    },
}
_COMPLETION: Json = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "anyOf": [{"type": "string"}, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]
        },
        "echo": _FLAG,
        **_SHARED,
    },
}
_PROFILE: Json = {
    "type": "object",
    "properties": {
        "num_steps": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_STEPS},
        "activities": {
            "type": ["array", "null"],
            "items": {"type": "string", "enum": list(ACTIVITIES)},
        },
        "with_stack": _FLAG,
        "record_shapes": _FLAG,
    },
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}


def _body(schema: Json) -> Json:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _errors(*statuses: int) -> dict[int | str, Json]:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


_MEANINGS = {
    400: "A member of the body is wrong or not supported",
    401: "No key, or one that is not known",
    403: "Closed: no admin key is set",
    404: "No such thing",
    408: "It took longer than it may",
    409: "A profile is open already, or there is none to end",
    413: "The body is too large",
    422: "Not used: wrong members are answered with 400",
    429: "The queue is full",
    500: "The engine gave the request up",
    503: "The engine is not running",
}

CHAT_BODY = _body(_CHAT)
COMPLETION_BODY = _body(_COMPLETION)
PROFILE_BODY: Json = {
    "requestBody": {"required": False, "content": {"application/json": {"schema": _PROFILE}}}
}
GENERATION_ERRORS = _errors(400, 401, 404, 408, 413, 429, 500, 503)
CONTROL_ERRORS = _errors(400, 401, 403, 404, 409, 413, 422, 500, 503)
FACT_ERRORS = _errors(401)
MODEL_ERRORS = _errors(401, 404, 422)
HEALTH_ERRORS = _errors(503)
