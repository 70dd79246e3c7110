"""The thread that steps the engine, and the thread-safe front others talk to."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kdray.core.profile import ProfileOrder
from kdray.core.request import Request
from kdray.driver.driver import Driver
from kdray.driver.scheduler import RequestOutput
from kdray.driver.stats import DriverStats, snapshot
from kdray.driver.step_log import StepLog
from kdray.driver.watch import Pulse, StepWatch
from kdray.errors import EngineClosed, InvalidRequest, RankFailed
from kdray.profiling.session import OnEnd

__all__ = ["DriverStats", "StepLoop", "snapshot"]

Emit = Callable[[list[RequestOutput]], None]
_IDLE_POLL_S = 1.0
_log = logging.getLogger(__name__)


class HasDriver(Protocol):
    """What building the engine yields (kdray.engine.Engine)."""

    @property
    def driver(self) -> Driver: ...


class StepLoop:
    """Builds an engine in a thread of its own and steps it while there is work.

    `emit` gets one list a step, in that thread. After a failure in a step nothing runs any more:
    `failure` holds the cause, on_end is called once, and submit raises it.
    """

    def __init__(
        self,
        build: Callable[[], HasDriver],
        emit: Emit,
        on_end: Callable[[], None],
        watch: StepWatch | None = None,
    ) -> None:
        self.ready: Future[HasDriver] = Future()
        self.failure: BaseException | None = None
        self._build = build
        self._emit = emit
        self._on_end = on_end
        self._watch = watch or StepWatch()
        self._inbox: queue.SimpleQueue[Callable[[Driver], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._stats = DriverStats()
        self._log = StepLog()
        self._thread = threading.Thread(target=self._run, name="kdray-step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, EngineClosed or RankFailed at once."""
        self._check_open()
        self.ready.result().driver.scheduler.validate(request)
        self._inbox.put(lambda driver: driver.submit(request))

    def abort(self, request_id: str) -> None:
        """Forget a request before the next step; unknown ids are fine."""
        self._inbox.put(lambda driver: _abort(driver, request_id))

    def begin_profile(self, order: ProfileOrder, on_end: OnEnd) -> None:
        """All ranks record from the next step on; on_end gets the number of steps, in the loop's
        thread. The caller sees to it that there is one profile at a time."""
        self._check_open()
        self._inbox.put(lambda driver: driver.profile.begin(order, on_end))

    def end_profile(self) -> None:
        """Before it has run all its steps; nothing happens where none is open."""
        self._inbox.put(lambda driver: driver.profile.end())

    def stats(self) -> DriverStats:
        return self._stats

    def pulse(self) -> Pulse:
        """How the loop gets on; answers while a step hangs."""
        return self._watch.pulse()

    def close(self, timeout_s: float) -> None:
        """Stop after the step that is running. Open requests are dropped."""
        self._closed.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise RankFailed(f"the engine has failed: {self.failure}")
        if self._closed.is_set():
            raise EngineClosed("the engine is closed")

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self.failure = error
            self.ready.set_exception(error)
            return
        self._stats = snapshot(engine.driver)
        self.ready.set_result(engine)
        try:
            self._steps(engine.driver)
            engine.driver.close()
        except BaseException as error:
            self.failure = error
        finally:
            self._on_end()

    def _steps(self, driver: Driver) -> None:
        busy = False
        while not self._closed.is_set():
            self._drain(driver, wait=not busy)
            with self._watch.step(driver.profile.allowance_s):
                outputs = driver.step()
            driver.profile.settle()
            busy = outputs is not None
            self._stats = snapshot(driver)
            if busy:
                self._log.stepped(self._stats)
            if outputs:
                self._emit(outputs)

    def _drain(self, driver: Driver, *, wait: bool) -> None:
        """Apply what others asked for; where idle, wait for the first of it."""
        try:
            action = self._inbox.get(timeout=_IDLE_POLL_S) if wait else self._inbox.get_nowait()
            while True:
                if action is not None:
                    _apply(action, driver)
                action = self._inbox.get_nowait()
        except queue.Empty:
            return


def _apply(action: Callable[[Driver], None], driver: Driver) -> None:
    try:
        action(driver)
    except InvalidRequest as error:  # another of the same id was queued since it was checked
        _log.warning("a request was dropped: %s", error)


def _abort(driver: Driver, request_id: str) -> None:
    driver.abort(request_id)
