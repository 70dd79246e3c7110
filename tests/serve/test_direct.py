"""The endpoint's own port: it drains when it is closed, and says so where it cannot open."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from kdray.errors import ConfigError
from kdray.serve import direct
from kdray.serve.arguments import Hosting
from tests.serve.conftest import BuildApp
from tests.serve.fakes import FakeEngine, running, steps
from tests.serve.http import free_port

HOST = "127.0.0.1"
BODY = {"prompt": "hi", "stream": True}


class HeldEngine(FakeEngine):
    """Gives its second step once it is told to go on."""

    def __init__(self) -> None:
        super().__init__(steps("a", "b"))
        self.go_on = asyncio.Event()

    async def outputs(self, request_id: str):  # type: ignore[no-untyped-def]
        async for delta in super().outputs(request_id):
            if delta.finish_reason is not None:
                await self.go_on.wait()
            yield delta


def test_what_is_open_ends_and_nothing_new_comes_in(app_of: BuildApp) -> None:
    async def run() -> str:
        engine, port = HeldEngine(), free_port()
        door = direct.DirectDoor(port, drain_s=30.0)
        await door.open(app_of(engine), HOST)
        async with (
            httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client,
            client.stream("POST", "/v1/completions", json=BODY) as answer,
        ):
            lines = answer.aiter_lines()
            first = await anext(lines)
            closing = asyncio.create_task(door.close())
            await _refuses(port)
            assert not closing.done()
            engine.go_on.set()
            rest = [line async for line in lines]
        await closing
        return "".join([first, *rest])

    assert asyncio.run(run()).endswith("data: [DONE]")


def test_what_does_not_end_is_cut_off_and_aborted(app_of: BuildApp) -> None:
    async def run() -> FakeEngine:
        engine, port = FakeEngine(running("a")), free_port()
        door = direct.DirectDoor(port, drain_s=1.0)
        await door.open(app_of(engine), HOST)
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    await door.close()
                    async for _ in lines:
                        pass
        return engine

    assert len(asyncio.run(run()).aborted) == 1


def test_a_port_that_stays_taken_is_named(
    app_of: BuildApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "BIND_S", 0.0)
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        door = direct.DirectDoor(port, drain_s=1.0)
        with pytest.raises(ConfigError, match=f"direct_port: cannot listen on {HOST}:{port}"):
            asyncio.run(door.open(app_of(FakeEngine()), HOST))


@pytest.mark.parametrize(
    ("port", "engines", "said"), [(8001, 2, "one endpoint's"), (0, 1, "1 to 65535")]
)
def test_a_direct_port_is_one_endpoint_s(port: int, engines: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Hosting(direct_port=port, engines=engines)


async def _refuses(port: int) -> None:
    """Returns once nobody listens there any more."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # it waited to be accepted while the port closed
                continue
            writer.close()
            await asyncio.sleep(0.01)
