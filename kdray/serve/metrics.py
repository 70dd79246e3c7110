"""What the surface counts itself, and what the engine says at scrape time: families of metrics.

docs/metrics.md names them all, beside those of other engines.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kdray.core.events import EVENTS
from kdray.driver.step_loop import DriverStats
from kdray.serve.families import Family, Histogram, histogram, labelled, single
from kdray.serve.generation import Choice, Generation, Progress
from kdray.serve.text import ChoiceStep

OUTCOMES = ("stop", "length", "error", "abort")
_TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0)
_WHOLE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_REMEMBERED = 32  # requests whose length says how long a queue takes
_LONGEST_RETRY_S = 60.0


class ServiceMetrics:
    """What the surface sees of its requests; observes generations.

    open_choices    outputs submitted and not ended, running or waiting
    queued_choices  those of them without a first token yet
    queued_tokens   prompt tokens of the queued ones
    """

    def __init__(self) -> None:
        self._began_at = int(time.time())
        self.open_choices = 0
        self.queued_choices = 0
        self.queued_tokens = 0
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._refusals: Counter[str] = Counter()
        self._responses: Counter[int] = Counter()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ttft = Histogram(_TTFT_BOUNDS)
        self._tpot = Histogram(_TPOT_BOUNDS)
        self._whole = Histogram(_WHOLE_BOUNDS)
        self._last_seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def started(self, generation: Generation) -> None:
        self.open_choices += len(generation.choices)
        self._prompt_tokens += sum(len(choice.prompt) for choice in generation.choices)
        for choice in generation.choices:
            self._queue(choice, 1)

    def began(self, choice: Choice) -> None:
        self._queue(choice, -1)

    def stepped(self, step: ChoiceStep) -> None:
        self._generation_tokens += step.num_tokens

    def ended(self, generation: Generation) -> None:
        self.open_choices -= len(generation.choices)
        self._last_seconds.append(generation.seconds)
        self._whole.observe(generation.seconds)
        for choice, progress in zip(generation.choices, generation.progress, strict=True):
            if progress.first_at is None:
                self._queue(choice, -1)
            self._outcomes[progress.outcome or "error"] += 1
            self._observe_times(generation.started_at, progress)

    def refused(self, code: str) -> None:
        """A request that got an error instead of an answer, by the error's code."""
        self._refusals[code] += 1

    def responded(self, status: int) -> None:
        """An HTTP answer has begun."""
        self._responses[status] += 1

    def retry_after_s(self) -> float:
        """About how long it takes until the queue is served: what is waiting, at the pace of the
        last requests. At least 1 second."""
        if not self._last_seconds:
            return 1.0
        mean = sum(self._last_seconds) / len(self._last_seconds)
        running = max(self.open_choices - self.queued_choices, 1)
        return min(max(mean * self.queued_choices / running, 1.0), _LONGEST_RETRY_S)

    def _queue(self, choice: Choice, sign: int) -> None:
        self.queued_choices += sign
        self.queued_tokens += sign * len(choice.prompt)

    def _observe_times(self, started_at: float, progress: Progress) -> None:
        if progress.first_at is None or progress.last_at is None:
            return
        self._ttft.observe(progress.first_at - started_at)
        later = progress.num_tokens - progress.num_first
        if later > 0:
            self._tpot.observe((progress.last_at - progress.first_at) / later)

    def families(self) -> Iterator[Family]:
        yield single(
            "start_time_seconds", "gauge", "When this endpoint began, since 1970: its counters are "
            "of the time behind it.", self._began_at,
        )  # fmt: skip
        yield labelled(
            "requests_total", "counter", "Outputs ended, by reason.", "finish_reason",
            self._outcomes,
        )  # fmt: skip
        yield labelled(
            "refused_requests_total", "counter", "Requests answered with an error, by its code.",
            "code", self._refusals,
        )  # fmt: skip
        yield labelled(
            "http_responses_total", "counter", "HTTP answers, by status.", "status",
            self._responses,
        )  # fmt: skip
        yield single("prompt_tokens_total", "counter", "Prompt tokens.", self._prompt_tokens)
        yield single(
            "generation_tokens_total", "counter", "Tokens generated.", self._generation_tokens
        )
        yield single("requests_open", "gauge", "Outputs under way here.", self.open_choices)
        yield single(
            "requests_queued", "gauge", "Outputs here without a token yet.", self.queued_choices
        )
        yield single(
            "queued_prompt_tokens", "gauge", "Prompt tokens of queued outputs.", self.queued_tokens
        )
        yield self._ttft.family(
            "time_to_first_token_seconds", "From the request to its first token."
        )
        yield self._tpot.family(
            "time_per_output_token_seconds", "Seconds a token, behind the first step's."
        )
        yield self._whole.family("request_seconds", "From the request to its last token.")


def families(
    service: ServiceMetrics, stats: DriverStats | None, events: Mapping[str, int]
) -> Iterator[Family]:
    """All metrics; without the engine's part where it gave no stats."""
    yield from service.families()
    for name, total in events.items():
        yield single(name, "counter", EVENTS[name], total)
    yield single("engine_up", "gauge", "1 while the engine answers.", int(stats is not None))
    if stats is not None:
        yield from _engine(stats)


def _engine(stats: DriverStats) -> Iterator[Family]:
    yield single("requests_running", "gauge", "Requests in the batch.", stats.running)
    yield single("requests_waiting", "gauge", "Requests in the engine's queue.", stats.waiting)
    yield single("pages_used", "gauge", "KV pages in use.", stats.pages_used)
    yield single("pages_total", "gauge", "KV pages in all.", stats.pages_total)
    yield single(
        "kv_use_ratio", "gauge", "KV pages in use, of all.",
        stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
    )  # fmt: skip
    yield single("steps_total", "counter", "Engine steps.", stats.steps)
    yield single("prompt_steps_total", "counter", "Steps with prompts.", stats.prompt_steps)
    yield single("verified_rows_total", "counter", "Rows the target ran.", stats.verified_rows)
    yield single("preemptions_total", "counter", "Requests preempted.", stats.preemptions)
    yield labelled(
        "step_seconds_total", "counter", "Seconds in steps, by verb.", "verb", stats.stage_seconds
    )
    yield _exact(
        "accept_length",
        "Tokens gained by a request in a speculative step, bonus token included.",
        stats.accept_lengths,
        range(1, max(stats.accept_lengths, default=0) + 1),
    )
    yield labelled(
        "accepted_at_depth_total",
        "counter",
        "Speculative steps whose accepted path reached a depth; of all, the accept rate there.",
        "depth",
        _reached(stats.accept_lengths),
    )
    yield _exact(
        "tree_nodes",
        "Draft nodes of a request's tree in a step.",
        stats.tree_nodes,
        _powers_of_two(max(stats.tree_nodes, default=0)),
    )
    yield labelled(
        "rank_heartbeat_age_seconds",
        "gauge",
        "Seconds since a rank's last sign of life.",
        "rank",
        stats.rank_ages_s,
    )


def _reached(accept_lengths: Mapping[int, int]) -> dict[int, int]:
    """depth -> steps that accepted a draft there: those of an accept length beyond it."""
    deepest = max(accept_lengths, default=1) - 1
    return {
        depth: sum(count for length, count in accept_lengths.items() if length > depth)
        for depth in range(1, deepest + 1)
    }


def _exact(name: str, text: str, counts: Mapping[int, int], bounds: Iterable[int]) -> Family:
    """A histogram of whole numbers that were counted one by one."""
    bounds = list(bounds)
    total = sum(value * count for value, count in counts.items())
    return histogram(name, text, bounds, _per_bucket(counts, bounds), total)


def _per_bucket(counts: Mapping[int, int], bounds: Sequence[int]) -> list[int]:
    buckets = [0] * (len(bounds) + 1)
    for value, count in counts.items():
        buckets[next((i for i, bound in enumerate(bounds) if value <= bound), -1)] += count
    return buckets


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range((most - 1).bit_length() + 1)] if most else []
