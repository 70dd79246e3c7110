"""The engine that a profile is made of: one that serves over HTTP, or one on this Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, Self

from kdray.actors.placement import Placement
from kdray.config import EngineConfig
from kdray.core.profile import ProfileOptions
from kdray.core.request import SamplingParams
from kdray.errors import ConfigError, KdrayError
from kdray.serve.engine import EngineClient, ProfileControl

_TIMEOUT_S = 600.0


class Profiled(Protocol):
    """What a profile needs of an engine."""

    @property
    def profiles(self) -> ProfileControl: ...

    @property
    def vocab_size(self) -> int: ...

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> None:
        """One greedy request, to its end."""


class LocalEngine:
    """An engine of this process's own, on the Ray cluster that it is connected to."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._requests = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, config: EngineConfig, placement: Placement) -> AsyncIterator[Self]:
        from kdray.actors.gang import Gang
        from kdray.serve.client import DriverClient

        gang = await asyncio.to_thread(Gang.start, config, placement)
        try:
            client = await DriverClient.connect(gang.driver)
            yield cls(client)
            await client.close()
        finally:
            gang.stop()

    @property
    def profiles(self) -> ProfileControl:
        return self._client.profiles

    @property
    def vocab_size(self) -> int:
        return self._client.info.vocab_size

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> None:
        self._requests += 1
        name = f"profile-{self._requests}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        await self._client.submit(name, list(prompt), sampling)
        async for delta in self._client.outputs(name):
            if delta.finish_reason == "error":
                raise KdrayError(delta.error or "the engine gave a request up")


class HttpEngine:
    """A server at a URL without the /v1."""

    vocab_size = 200  # few enough for every tokenizer

    def __init__(self, url: str, key: str | None) -> None:
        self._http = _Http(url.rstrip("/"), key)
        self.profiles: ProfileControl = HttpProfiles(self._http)

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> None:
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        await self._http.post("/v1/completions", body)


class HttpProfiles:
    """kdray.serve.engine.ProfileControl over HTTP."""

    def __init__(self, http: _Http) -> None:
        self._http = http

    async def start(self, options: ProfileOptions) -> dict[str, Any]:
        return await self._http.post(
            "/start_profile",
            {
                "num_steps": options.num_steps,
                "activities": sorted(options.activities),
                "with_stack": options.with_stack,
                "record_shapes": options.record_shapes,
            },
        )

    async def stop(self) -> dict[str, Any]:
        return await self._http.post("/stop_profile", {})

    async def names(self) -> list[str]:
        return list(json.loads(await self._http.get("/profiles"))["data"])

    async def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(await self._http.get(f"/profiles/{urllib.parse.quote(name)}")))

    async def read(self, name: str, file: str) -> bytes:
        return await self._http.get(
            f"/profiles/{urllib.parse.quote(name)}/{urllib.parse.quote(file)}"
        )


class _Http:
    def __init__(self, url: str, key: str | None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"--url must begin with http:// or https://, got {url}")
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(await self._call(path, json.dumps(body).encode())))

    async def get(self, path: str) -> bytes:
        return await self._call(path, None)

    async def _call(self, path: str, data: bytes | None) -> bytes:
        request = urllib.request.Request(self._url + path, data, self._headers)
        return await asyncio.to_thread(_read, request)


def _read(request: urllib.request.Request) -> bytes:
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        raise KdrayError(f"{request.full_url} answered {error.code}: {said}") from None
    except OSError as error:
        raise KdrayError(f"{request.full_url} does not answer: {error}") from None
