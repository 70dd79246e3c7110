"""The driver client: one stream handed out to all requests, and what happens when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kdray.core.request import SamplingParams
from kdray.errors import EngineClosed, InvalidRequest, RankFailed
from kdray.serve.client import DriverClient
from kdray.serve.engine import RequestDelta
from tests.serve.drivers import FATAL, FOREVER, REFUSED, ScriptedDriver
from tests.serve.fakes import MAX_MODEL_LEN, STATS

SAMPLING = SamplingParams()


class Method:
    """A method as an actor handle shows it: `.remote(...)`, and a stream after `.options(...)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._call(*arguments))

    def options(self, *, num_returns: str) -> Stream:
        assert num_returns == "streaming"
        return Stream(self._call)


class Stream:
    """Yields awaitable references, as Ray's streaming generators do."""

    def __init__(self, call: Callable[..., AsyncIterator[Any]]) -> None:
        self._call = call

    async def remote(self) -> AsyncIterator[Awaitable[Any]]:
        async for item in self._call():
            yield asyncio.ensure_future(_self(item))


async def _self(item: Any) -> Any:
    return item


class Handle:
    """An actor handle over an object of this process."""

    def __init__(self, actor: object) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.actor, name))


def run(scenario: Callable[[DriverClient, ScriptedDriver], Awaitable[None]]) -> None:
    async def connected() -> None:
        driver = ScriptedDriver()
        client = await DriverClient.connect(Handle(driver))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await scenario(client, driver)
        finally:
            await client.close()

    asyncio.run(connected())


async def collect(client: DriverClient, request_id: str) -> list[RequestDelta]:
    return [delta async for delta in client.outputs(request_id)]


def test_facts_and_figures() -> None:
    async def scenario(client: DriverClient, _: ScriptedDriver) -> None:
        assert (client.info.name, client.info.max_model_len) == ("scripted", MAX_MODEL_LEN)
        assert client.healthy() is None
        assert await client.stats() == STATS

    run(scenario)


def test_each_request_gets_its_own_part() -> None:
    async def scenario(client: DriverClient, _: ScriptedDriver) -> None:
        prompts = {"a": b"one two", "b": b"three", "c": b"x"}
        for request_id, prompt in prompts.items():
            await client.submit(request_id, list(prompt), SAMPLING)
        for request_id, prompt in prompts.items():
            deltas = await collect(client, request_id)
            assert b"".join(bytes(delta.token_ids) for delta in deltas) == prompt
            assert [delta.accept_length for delta in deltas][:2] == [None, 2][: len(deltas)]
            assert deltas[-1].finish_reason == "length"

    run(scenario)


def test_outputs_that_ended_before_they_were_read_are_kept() -> None:
    async def scenario(client: DriverClient, _: ScriptedDriver) -> None:
        await client.submit("late", list(b"abcd"), SAMPLING)
        await asyncio.sleep(0.05)
        assert [bytes(delta.token_ids) for delta in await collect(client, "late")] == [b"ab", b"cd"]
        assert await collect(client, "late") == []

    run(scenario)


def test_a_refusal_keeps_its_kind_and_leaves_nothing_behind() -> None:
    async def scenario(client: DriverClient, _: ScriptedDriver) -> None:
        with pytest.raises(InvalidRequest, match="never run") as caught:
            await client.submit("bad", list(REFUSED), SAMPLING)
        assert caught.value.param == "prompt"
        assert await collect(client, "bad") == []

    run(scenario)


def test_who_is_connected_misses_nothing() -> None:
    """Ray may run a submit before the stream that was asked for first: so that has to begin."""

    async def connected() -> None:
        driver, go_on = ScriptedDriver(), asyncio.Event()
        begun = driver.outputs

        async def outputs() -> AsyncIterator[Any]:
            await go_on.wait()
            async for message in begun():
                yield message

        driver.outputs = outputs  # type: ignore[method-assign]
        connecting = asyncio.create_task(DriverClient.connect(Handle(driver)))  # type: ignore[arg-type]
        await asyncio.wait({connecting}, timeout=0.05)
        assert not connecting.done()
        go_on.set()
        client = await connecting
        await client.submit("a", list(b"ab"), SAMPLING)
        assert [bytes(delta.token_ids) for delta in await collect(client, "a")] == [b"ab"]
        await client.close()

    asyncio.run(connected())


def test_an_abort_reaches_the_driver() -> None:
    async def scenario(client: DriverClient, driver: ScriptedDriver) -> None:
        await client.submit("a", list(FOREVER), SAMPLING)
        await client.abort("a")
        assert await driver.aborted() == ["a"]
        assert await collect(client, "a") == []

    run(scenario)


def test_an_abort_does_not_overtake_its_submit() -> None:
    """Ray may run two calls of an actor in either order; here a submit lasts until it is let go."""

    async def scenario(client: DriverClient, driver: ScriptedDriver) -> None:
        arrived, go_on = asyncio.Event(), asyncio.Event()
        taken = driver.submit

        async def submit(*arguments: Any) -> None:
            arrived.set()
            await go_on.wait()
            await taken(*arguments)

        driver.submit = submit  # type: ignore[method-assign]
        submitting = asyncio.create_task(client.submit("a", list(FOREVER), SAMPLING))
        await arrived.wait()
        submitting.cancel()  # as where a client leaves
        with pytest.raises(asyncio.CancelledError):
            await submitting
        aborting = asyncio.create_task(client.abort("a"))
        assert await client.stats() == STATS  # a whole call later
        assert (await driver.aborted(), aborting.done()) == ([], False)
        go_on.set()
        await aborting
        assert (await driver.endless(), await driver.aborted()) == (1, ["a"])

    run(scenario)


def test_an_abort_behind_a_refused_submit_is_no_error() -> None:
    async def scenario(client: DriverClient, driver: ScriptedDriver) -> None:
        submitting = asyncio.create_task(client.submit("a", list(REFUSED), SAMPLING))
        await asyncio.sleep(0)  # it has asked
        await client.abort("a")
        assert await driver.aborted() == ["a"]
        with pytest.raises(InvalidRequest, match="never run"):
            await submitting

    run(scenario)


def test_when_the_stream_fails_open_requests_end_with_the_cause() -> None:
    async def scenario(client: DriverClient, driver: ScriptedDriver) -> None:
        await client.submit("open", list(FOREVER), SAMPLING)
        await client.submit("last", list(FATAL), SAMPLING)
        deltas = await collect(client, "open")
        assert deltas[-1].finish_reason == "error"
        assert "rank 1 died" in (deltas[-1].error or "")
        assert "rank 1 died" in (client.healthy() or "")
        with pytest.raises((EngineClosed, RankFailed), match="rank 1 died"):
            await client.submit("more", list(b"x"), SAMPLING)
        await client.abort("open")
        assert await driver.aborted() == []  # nothing runs there any more

    run(scenario)
