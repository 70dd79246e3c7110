"""How an endpoint is called, and one call of it: what jobs/serve.py shows when it is ready."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kdray.errors import KdrayError

PROMPT = "Tell a story about Mia and a red kite."
MAX_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An endpoint as its clients see it; `key` where it wants one."""

    host: str
    port: int
    model: str
    key: str | None = None

    @property
    def base(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return http.client.HTTPConnection(host, self.port, timeout=timeout_s)

    @property
    def headers(self) -> dict[str, str]:
        plain = {"Content-Type": "application/json"}
        return plain | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


def how_to_call(address: Address) -> str:
    message = {"role": "user", "content": PROMPT}
    body = {"model": address.model, "messages": [message], "temperature": 0, "stream": True}
    lines = [
        f"curl -sN {address.base}/chat/completions -H 'Content-Type: application/json'",
        f"-d '{json.dumps(body)}'",
    ]
    if address.key is not None:
        lines.insert(1, '-H "Authorization: Bearer $KEY"')
    command = " \\\n    ".join(lines)
    return f"serving {address.model!r} at {address.base}\n\n  {command}\n"


def show_sample(address: Address) -> None:
    """Stream one chat completion to stdout, then its accept length."""
    usage: dict[str, Any] = {}
    print(f"> {PROMPT}")
    for chunk in stream_chat(address):
        if "error" in chunk:
            raise KdrayError(f"the sample request failed: {chunk['error']['message']}")
        for choice in chunk["choices"]:
            print(choice["delta"].get("content", ""), end="", flush=True)
        usage = chunk["usage"] or usage
    mean = usage["kdray"]["accept_length_mean"]
    speculation = "plain decoding" if mean is None else f"accept length {mean:.2f}"
    print(f"\n\n  {usage['completion_tokens']} tokens, {speculation}\n", flush=True)


def stream_chat(address: Address) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed sample."""
    body = {
        "model": address.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with contextlib.closing(address.connection(timeout_s=120)) as connection:
        path = "/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), address.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise KdrayError(f"the sample request failed: {response.read().decode()}")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)


def unhealthy(address: Address) -> str | None:
    """None, or what /health answered."""
    try:
        with contextlib.closing(address.connection(timeout_s=10)) as connection:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
    except OSError as error:
        return f"no answer from the endpoint: {error}"
    if response.status == 200:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body
