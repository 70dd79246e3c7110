"""The driver's side of a profile: when it begins, how many steps it has run, when it ends."""

from __future__ import annotations

from collections.abc import Callable

from kdray.core.plan import VerifierGroup
from kdray.core.profile import ProfileOrder
from kdray.profiling.recorder import Recorder

OnEnd = Callable[[int], None]
ALLOWANCE_S = 120.0  # profilers load libraries when they begin and hand over events when they end


class ProfileSession:
    """Begins and ends a profile on all ranks between the same two steps.

    The other ranks are told through the channel of the step headers, which keeps its order, so
    nobody counts but the driver. Not thread-safe: the thread that steps calls it.
    """

    def __init__(self, recorder: Recorder, ranks: VerifierGroup) -> None:
        self._recorder = recorder
        self._ranks = ranks
        self._order: ProfileOrder | None = None
        self._on_end: OnEnd | None = None
        self._steps = 0
        self._allowed_steps = 0

    @property
    def is_open(self) -> bool:
        return self._order is not None

    @property
    def allowance_s(self) -> float:
        """Seconds the next step may take because ranks begin or end recording in front of it."""
        return ALLOWANCE_S if self._allowed_steps else 0.0

    def begin(self, order: ProfileOrder, on_end: OnEnd) -> None:
        """Record from the next step on; on_end gets the number of steps once nothing records."""
        assert self._order is None, "one profile at a time"
        self._ranks.profile(order)
        self._recorder.begin(order)
        self._order, self._on_end, self._steps = order, on_end, 0
        self._allowed_steps = 2

    def stepped(self, start_ns: int) -> None:
        """A step that began at start_ns (time.time_ns) has ended."""
        self._allowed_steps = max(self._allowed_steps - 1, 0)
        if self._order is None:
            return
        self._steps += 1
        self._recorder.add_span(f"step {self._steps}", start_ns)

    def settle(self) -> None:
        """End what has run all its steps. Between two steps, so that no step's time holds it."""
        if self._order is not None and self._steps >= self._order.options.num_steps:
            self.end()

    def join(self) -> None:
        """Wait for the files of what has ended, of this process."""
        self._recorder.join()

    def end(self) -> None:
        """Idempotent."""
        if self._order is None or self._on_end is None:
            return
        on_end, self._order, self._on_end = self._on_end, None, None
        self._allowed_steps = 2
        self._ranks.profile(None)
        self._recorder.end()
        on_end(self._steps)
