"""The replaying client over scripted gangs: what is submitted again, and what readers see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kdray.actors.supervisor import Incarnation
from kdray.core.request import SamplingParams
from kdray.errors import EngineClosed, RankFailed
from kdray.serve.replay import ReplayingClient
from tests.serve.drivers import ScriptedDriver, StepMessage
from tests.serve.fakes import STATS
from tests.serve.test_client import Handle

SAMPLING = SamplingParams(max_tokens=64)


class Gang(ScriptedDriver):
    """Says one token a call of say(); remembers what was submitted; ends when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: dict[str, tuple[bytes, int | None, bytes]] = {}
        self.arrived = asyncio.Event()
        self.refuses = False

    async def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        delivered: tuple[int, ...] = (),
    ) -> None:
        if self.refuses:
            raise RankFailed("the engine has failed")
        self.submitted[request_id] = (bytes(prompt), sampling.seed, bytes(delivered))
        self.arrived.set()

    def say(self, request_id: str, tokens: bytes, reason: str | None = None) -> None:
        error = "no finite logit" if reason == "error" else None
        message: StepMessage = [(request_id, tuple(tokens), None, reason, error)]
        self._messages.put_nowait(message)

    def die(self) -> None:
        self._messages.put_nowait(RankFailed("rank 1 died"))


class Supervisor:
    """Shows one gang after another; told() are the incarnations that clients lost."""

    def __init__(self) -> None:
        self.gangs: list[Gang] = []
        self.told: list[int] = []
        self._end: Exception | None = None
        self._changed = asyncio.Condition()

    async def incarnation(self, after: int) -> Incarnation:
        async with self._changed:
            await self._changed.wait_for(lambda: self._end or len(self.gangs) > after + 1)
        if self._end is not None:
            raise self._end
        number = len(self.gangs) - 1
        driver: Any = Handle(self.gangs[number])
        return Incarnation(number=number, driver=driver, info={}, hangs=number // 2)

    async def lost(self, number: int) -> None:
        self.told.append(number)

    async def bring_up(self, *, refuses: bool = False) -> Gang:
        self.gangs.append(Gang())
        self.gangs[-1].refuses = refuses
        async with self._changed:
            self._changed.notify_all()
        return self.gangs[-1]

    async def give_up(self, cause: str) -> None:
        self._end = RankFailed(cause)
        async with self._changed:
            self._changed.notify_all()


def run(scenario: Callable[[ReplayingClient, Supervisor], Awaitable[None]]) -> None:
    async def connected() -> None:
        supervisor = Supervisor()
        await supervisor.bring_up()
        client = await ReplayingClient.connect(Handle(supervisor))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await scenario(client, supervisor)
        finally:
            await client.close()

    asyncio.run(connected())


async def next_tokens(outputs: AsyncIterator[Any]) -> bytes:
    return bytes((await anext(outputs)).token_ids)


def test_a_lost_request_goes_on_behind_what_its_reader_got() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        first = supervisor.gangs[0]
        await client.submit("a", list(b"prompt"), SAMPLING)
        _, seed, _ = first.submitted["a"]
        assert seed is not None
        outputs = client.outputs("a")
        first.say("a", b"on")
        first.say("a", b"ce")
        assert [await next_tokens(outputs) for _ in range(2)] == [b"on", b"ce"]
        first.die()
        waiting = asyncio.create_task(next_tokens(outputs))
        await asyncio.sleep(0)
        second = await supervisor.bring_up()
        await second.arrived.wait()
        assert second.submitted["a"] == (b"prompt", seed, b"once")
        second.say("a", b" more", "length")
        assert await waiting == b" more"
        assert [delta async for delta in outputs] == []
        totals = client.events.totals()
        assert totals["replayed_requests_total"] == 1 and totals["replayed_tokens_total"] == 4
        assert totals["restarts_total"] == 1 and supervisor.told == [0]

    run(scenario)


def test_tokens_that_came_before_the_end_are_read_first() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        first = supervisor.gangs[0]
        await client.submit("a", list(b"p"), SAMPLING)
        first.say("a", b"xy")
        first.die()
        second = await supervisor.bring_up()
        outputs = client.outputs("a")
        assert await next_tokens(outputs) == b"xy"
        waiting = asyncio.create_task(next_tokens(outputs))
        await second.arrived.wait()
        assert second.submitted["a"][2] == b"xy"
        second.say("a", b"z", "stop")
        assert await waiting == b"z"

    run(scenario)


def test_who_comes_while_there_is_no_gang_waits_for_one() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        supervisor.gangs[0].refuses = True
        submitting = asyncio.create_task(client.submit("late", list(b"p"), SAMPLING))
        while not supervisor.told:
            await asyncio.sleep(0)
        assert client.healthy() is None and not submitting.done()
        second = await supervisor.bring_up()
        await submitting
        assert set(second.submitted) == {"late"}

    run(scenario)


def test_a_gang_that_dies_while_it_takes_requests_again_is_followed_by_the_next() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        await client.submit("a", list(b"p"), SAMPLING)
        supervisor.gangs[0].die()
        reading = asyncio.create_task(next_tokens(client.outputs("a")))
        await supervisor.bring_up(refuses=True)
        while supervisor.told != [0, 1]:
            await asyncio.sleep(0)
        third = await supervisor.bring_up()
        await third.arrived.wait()
        third.say("a", b"z", "stop")
        assert await reading == b"z"
        assert client.events.totals()["watchdog_expirations_total"] == 1

    run(scenario)


def test_an_aborted_request_is_not_submitted_again() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        for name in ("gone", "stays"):
            await client.submit(name, list(b"p"), SAMPLING)
        await client.abort("gone")
        assert await supervisor.gangs[0].aborted() == ["gone"]
        assert [delta async for delta in client.outputs("gone")] == []
        reading = asyncio.create_task(next_tokens(client.outputs("stays")))
        supervisor.gangs[0].die()
        second = await supervisor.bring_up()
        await second.arrived.wait()
        assert set(second.submitted) == {"stays"}
        reading.cancel()

    run(scenario)


def test_a_broken_request_ends_with_its_error_and_is_counted() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        await client.submit("bad", list(b"p"), SAMPLING)
        supervisor.gangs[0].say("bad", b"", "error")
        [delta] = [delta async for delta in client.outputs("bad")]
        assert (delta.finish_reason, delta.error) == ("error", "no finite logit")
        assert client.events.totals()["broken_requests_total"] == 1
        assert supervisor.told == []

    run(scenario)


def test_totals_go_on_over_restarts_and_gauges_do_not() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        assert await client.stats() == STATS
        supervisor.gangs[0].die()
        await supervisor.bring_up()
        while client.events.totals()["restarts_total"] == 0:
            await asyncio.sleep(0)
        for _ in range(2):
            stats = await client.stats()
            assert (stats.steps, stats.generated_tokens) == (24, 80)
            assert stats.accept_lengths == {1: 6, 4: 10}
            assert stats.stage_seconds == {"draft": 0.5, "verify": 3.0}
            assert (stats.running, stats.pages_used) == (STATS.running, STATS.pages_used)

    run(scenario)


def test_when_the_engine_is_given_up_everybody_hears_the_cause() -> None:
    async def scenario(client: ReplayingClient, supervisor: Supervisor) -> None:
        await client.submit("a", list(b"p"), SAMPLING)
        reading = asyncio.create_task(next_tokens(client.outputs("a")))
        supervisor.gangs[0].die()
        await supervisor.give_up("rank 1 died three times")
        with pytest.raises(EngineClosed, match="three times"):
            await reading
        assert client.healthy() == "rank 1 died three times"
        with pytest.raises(EngineClosed, match="three times"):
            await client.submit("b", list(b"p"), SAMPLING)
        with pytest.raises(EngineClosed, match="three times"):
            await client.stats()

    run(scenario)
