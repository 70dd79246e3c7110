"""Bad requests, drawn by hypothesis from what a server's own /openapi.json says.

Most are wrong in some way: a member of another type or size, one that is missing or too much, bytes
that are no JSON, a method, a path, a query or a header that nobody meant. Some are right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Json = dict[str, Any]
# Routes that make the server work long, and so are asked for less often.
_RARE = ("/start_profile", "/stop_profile")
_GENERATING = ("/v1/chat/completions", "/v1/completions")
_PATH_TEXT = "abcXYZ012 ._~%/-é☃\\:;@&=+$,?#\x7f"

_EXTREMES = (10**400, 1e308, -1e308, -0.0, 2**63, -(2**63), 1e-320, "NaN", "\ud800", "\0")

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(
        [10**400, 1e308, -1e308, -0.0, 2**63, -(2**63), 1e-320, "NaN", "\ud800", "\0"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@dataclass(frozen=True)
class FuzzRequest:
    """One request, as it goes over the wire."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def requests(openapi: Json) -> st.SearchStrategy[FuzzRequest]:
    """Any request to any route, or to one that there is not."""
    routes = [
        _route(openapi, path, method)
        for path, operations in openapi["paths"].items()
        for method in operations
        if path not in _RARE
    ]
    rare = [_route(openapi, path, "post") for path in _RARE if path in openapi["paths"]]
    generating = [_route(openapi, path, "post") for path in _GENERATING]
    kinds = [*generating * 20, *routes * 2, *rare, _stray()]
    return st.sampled_from(range(len(kinds))).flatmap(lambda i: kinds[i])


def _route(openapi: Json, path: str, method: str) -> st.SearchStrategy[FuzzRequest]:
    schema = _body_schema(openapi["paths"][path][method])
    body = st.just(b"") if schema is None else bodies(schema)
    return st.builds(
        _request,
        method=st.sampled_from([method.upper()] * 30 + ["GET", "PUT", "DELETE", "PATCH", "HEAD"]),
        path=_paths(path),
        query=st.just("") | st.just("") | st.text(_PATH_TEXT, max_size=12),
        body=body | body | body | st.binary(max_size=60),
        headers=_headers(),
    )


def _stray() -> st.SearchStrategy[FuzzRequest]:
    return st.builds(
        _request,
        method=st.sampled_from(["GET", "POST", "OPTIONS", "TRACE", "PUT"]),
        path=st.text(_PATH_TEXT, max_size=40).map(lambda text: f"/{text}"),
        query=st.just(""),
        body=st.binary(max_size=20),
        headers=_headers(),
    )


def _request(
    method: str, path: str, query: str, body: bytes, headers: Mapping[str, str]
) -> FuzzRequest:
    target = _quoted(path) + (f"?{_quoted(query)}" if query else "")
    return FuzzRequest(method=method, path=target, body=body, headers=headers)


def _quoted(text: str) -> str:
    """What cannot stand in a request line is escaped; what can is left, however odd."""
    return "".join(c if "!" <= c <= "~" and c != "#" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _paths(template: str) -> st.SearchStrategy[str]:
    """The template with its parameters filled in by anything."""
    if "{" not in template:
        return st.just(template)
    head = template.partition("{")[0]
    names = st.sampled_from(["..", "../..", "%2e%2e/etc/passwd", "a/b", ".", "demo"])
    return (names | st.text(_PATH_TEXT, max_size=30)).map(lambda rest: head + rest)


def _headers() -> st.SearchStrategy[dict[str, str]]:
    values = st.text("abc/;=-, 0123456789*", max_size=20).map(str.strip)
    odd = st.dictionaries(
        st.sampled_from(["Content-Type", "Accept", "Authorization", "X-Request-Id", "Cookie"]),
        values,
        max_size=3,
    )
    return st.just({"Content-Type": "application/json"}) | odd


def bodies(schema: Json) -> st.SearchStrategy[bytes]:
    """JSON of a valid body with something wrong in it; now and then nothing is."""
    valid = values(schema)
    return st.one_of(
        st.tuples(valid, st.dictionaries(_names(schema), ODD, max_size=3)).map(_with),
        st.tuples(valid, st.sets(_names(schema), max_size=3)).map(_without),
        ODD.map(_encoded),
        valid.map(_encoded),
        st.tuples(valid.map(_encoded), st.integers(1, 30)).map(lambda pair: pair[0][: -pair[1]]),
        st.tuples(valid.map(_encoded), st.binary(min_size=1, max_size=4)).map(b"".join),
        st.integers(1, 3000).map(lambda depth: b'{"messages":' + b"[" * depth),
    )


def _with(pair: tuple[Json, Json]) -> bytes:
    valid, odd = pair
    return _encoded(valid | odd)


def _without(pair: tuple[Json, set[str]]) -> bytes:
    valid, missing = pair
    return _encoded({name: value for name, value in valid.items() if name not in missing})


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def _names(schema: Json) -> st.SearchStrategy[str]:
    """A member the schema knows, one that other servers know, or none at all."""
    others = ["tools", "response_format", "logprobs", "best_of", "user", "", "__proto__"]
    return st.sampled_from([*schema["properties"], *others])


def values(schema: Json) -> st.SearchStrategy[Any]:
    """What a schema allows, as far as ours use the language."""
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return st.one_of([values(option) for option in schema[word]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds = schema.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return st.one_of([_of_kind(kind, schema) for kind in kinds])


def _of_kind(kind: str, schema: Json) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high if high is not None else (low or 0) + 8)
        case "number":
            least = schema.get("exclusiveMinimum", low)
            return st.floats(least, high, exclude_min="exclusiveMinimum" in schema)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=20)
        case "array":
            items = values(schema.get("items", {"type": "null"}))
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
    return _object(schema)


def _object(schema: Json) -> st.SearchStrategy[Json]:
    properties = schema.get("properties", {})
    required = set(schema.get("required", ()))
    if "additionalProperties" in schema:
        keys = st.integers(0, 200).map(str)
        return st.dictionaries(keys, values(schema["additionalProperties"]), max_size=3)
    return st.fixed_dictionaries(
        {name: values(properties[name]) for name in required},
        optional={name: values(s) for name, s in properties.items() if name not in required},
    )


def _body_schema(operation: Json) -> Json | None:
    content = operation.get("requestBody", {}).get("content", {})
    return content.get("application/json", {}).get("schema")
