"""Clients straight at a driver: each asks again a while after its answer, by a clock of choice."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from kdray.core.plan import RequestResult, StepPlan, StepResult
from kdray.core.request import Request
from kdray.driver.ahead import InFlight
from kdray.driver.driver import Driver
from kdray.driver.scheduler import AheadStep


class Clock(Protocol):
    """Seconds from any start."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - time.monotonic()))


class ModelledClock:
    """The host's time where only steps pass it, so counts are the same on every machine.

    A device round takes round_s behind the ones in front of it. The host launches it in launch_s
    and a step of its own in host_step_s, and waits for what it reads.
    """

    def __init__(
        self, driver: Driver, *, round_s: float, host_step_s: float, launch_s: float = 0.0
    ) -> None:
        assert driver._decoder is not None, "made for rounds that run ahead of the host"
        self._now = self._device = 0.0
        self._round_s, self._host_step_s, self._launch_s = round_s, host_step_s, launch_s
        self._ends: dict[int, float] = {}  # step -> when the device is through with it
        self._launch, self._collect = driver._decoder.launch, driver._decoder.collect
        self._round = driver.round
        driver._decoder.launch = self._launched  # type: ignore[method-assign]
        driver._decoder.collect = self._collected  # type: ignore[method-assign]
        driver.round = self._stepped  # type: ignore[method-assign]

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def _launched(self, step: AheadStep) -> InFlight:
        self._now += self._launch_s
        self._device = max(self._device, self._now) + self._round_s
        self._ends[step.step] = self._device
        return self._launch(step)

    def _collected(self, flight: InFlight) -> list[RequestResult]:
        self.wait_until(self._ends[flight.step.step])
        return self._collect(flight)

    def _stepped(self, plan: StepPlan) -> StepResult:
        self._now = self._device = max(self._device, self._now + self._host_step_s)
        return self._round(plan)


@dataclass(slots=True)
class Loop:
    """What a loop came to.

    ttft_s, latency_s   of each request, from when it was asked
    running             requests in a device round -> rounds of so many
    """

    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    running: Counter[int] = field(default_factory=Counter)


def run_loop(
    driver: Driver, requests: Sequence[Request], clients: int, away_s: float, clock: Clock
) -> Loop:
    """All requests in their order; a client comes back away_s after its answer's end."""
    loop, start = Loop(), clock.now()
    asking = [(start, n) for n in range(clients)]  # when each client asks next
    coming, asked = iter(requests), dict[str, tuple[float, int]]()
    started = set[str]()
    with counted_rounds(driver, loop.running):
        while len(loop.latency_s) < len(requests):
            while asking and asking[0][0] <= clock.now():
                moment, client = heapq.heappop(asking)
                if (request := next(coming, None)) is not None:
                    asked[request.request_id] = moment, client
                    driver.submit(request)
            outputs = driver.step()
            if outputs is None and asking:
                clock.wait_until(asking[0][0])
            for output in outputs or ():
                since, client = asked[output.request_id]
                if output.request_id not in started:
                    started.add(output.request_id)
                    loop.ttft_s.append(clock.now() - since)
                if output.finish_reason is not None:
                    loop.latency_s.append(clock.now() - since)
                    heapq.heappush(asking, (clock.now() + away_s, client))
        loop.seconds = clock.now() - start
        while driver.step() is not None:  # a round of those who had ended
            pass
    return loop


@contextmanager
def counted_rounds(driver: Driver, running: Counter[int]) -> Iterator[None]:
    """Adds every device round of the driver to `running`, by its requests."""
    decoder = driver._decoder
    assert decoder is not None, "made for rounds that run ahead of the host"
    launch = decoder.launch

    def launched(step: AheadStep) -> InFlight:
        running[len(step.requests)] += 1
        return launch(step)

    decoder.launch = launched  # type: ignore[method-assign]
    yield
    decoder.launch = launch  # type: ignore[method-assign]
