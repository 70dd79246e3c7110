"""Prometheus text: what the surface counts itself, and what the engine says at scrape time."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from kdray.driver.step_loop import DriverStats
from kdray.serve.generation import Choice, Progress
from kdray.serve.text import ChoiceStep

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("stop", "length", "error", "abort")
_TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0)


class Histogram:
    """Counts below upper bounds, with sum and count."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def render(self, name: str, text: str) -> Iterator[str]:
        return _histogram(name, text, self._bounds, self._counts, self._sum)


class ServiceMetrics:
    """What the surface sees of its requests; observes generations.

    open_choices   outputs submitted and not ended, running or waiting
    """

    def __init__(self) -> None:
        self.open_choices = 0
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._ttft = Histogram(_TTFT_BOUNDS)
        self._tpot = Histogram(_TPOT_BOUNDS)

    def started(self, choices: Sequence[Choice]) -> None:
        self.open_choices += len(choices)
        self._prompt_tokens += sum(len(choice.prompt) for choice in choices)

    def stepped(self, step: ChoiceStep) -> None:
        self._generation_tokens += step.num_tokens

    def ended(self, started_at: float, progress: Sequence[Progress]) -> None:
        self.open_choices -= len(progress)
        for choice in progress:
            self._outcomes[choice.outcome or "error"] += 1
            self._observe_times(started_at, choice)

    def _observe_times(self, started_at: float, choice: Progress) -> None:
        if choice.first_at is None or choice.last_at is None:
            return
        self._ttft.observe(choice.first_at - started_at)
        later = choice.num_tokens - choice.num_first
        if later > 0:
            self._tpot.observe((choice.last_at - choice.first_at) / later)

    def render(self) -> Iterator[str]:
        yield from _family("kdray_requests_total", "counter", "Outputs ended, by finish reason.")
        for reason, count in self._outcomes.items():
            yield f'kdray_requests_total{{finish_reason="{reason}"}} {count}'
        yield from _single("prompt_tokens_total", "counter", "Prompt tokens.", self._prompt_tokens)
        yield from _single(
            "generation_tokens_total", "counter", "Tokens generated.", self._generation_tokens
        )
        yield from self._ttft.render(
            "kdray_time_to_first_token_seconds", "From the request to its first token."
        )
        yield from self._tpot.render(
            "kdray_time_per_output_token_seconds", "Seconds a token, behind the first step's."
        )


def render(service: ServiceMetrics, stats: DriverStats | None) -> str:
    """The whole page; without the engine's part where it gave no stats."""
    lines = list(service.render())
    lines += _single("engine_up", "gauge", "1 while the engine answers.", int(stats is not None))
    if stats is not None:
        lines += _engine(stats)
    return "\n".join(lines) + "\n"


def _engine(stats: DriverStats) -> Iterator[str]:
    yield from _single("requests_running", "gauge", "Requests in the batch.", stats.running)
    yield from _single("requests_waiting", "gauge", "Requests in the queue.", stats.waiting)
    yield from _single("pages_used", "gauge", "KV pages in use.", stats.pages_used)
    yield from _single("pages_total", "gauge", "KV pages in all.", stats.pages_total)
    yield from _single("steps_total", "counter", "Engine steps.", stats.steps)
    yield from _single(
        "verified_rows_total", "counter", "Rows the target ran.", stats.verified_rows
    )
    yield from _single("preemptions_total", "counter", "Requests preempted.", stats.preemptions)
    yield from _family("kdray_step_seconds_total", "counter", "Seconds in steps, by verb.")
    for verb, seconds in stats.stage_seconds.items():
        yield f'kdray_step_seconds_total{{verb="{verb}"}} {seconds:.9g}'
    yield from _accept_length(stats.accept_lengths)


def _accept_length(counts: Mapping[int, int]) -> Iterator[str]:
    """Accept lengths start at 1, and each has a bucket of its own."""
    bounds = range(1, max(counts, default=0) + 1)
    yield from _histogram(
        "kdray_accept_length",
        "Tokens gained by a request in a speculative step, bonus token included.",
        bounds,
        [*(counts.get(length, 0) for length in bounds), 0],
        sum(length * count for length, count in counts.items()),
    )


def _histogram(
    name: str, text: str, bounds: Iterable[float], counts: Sequence[int], total: float
) -> Iterator[str]:
    """`counts` has one item a bound, and a last one for what lies above all of them."""
    yield from _family(name, "histogram", text)
    running = list(accumulate(counts))
    for bound, count in zip(bounds, running, strict=False):
        yield f'{name}_bucket{{le="{bound}"}} {count}'
    yield f'{name}_bucket{{le="+Inf"}} {running[-1]}'
    yield f"{name}_sum {total:.9g}"
    yield f"{name}_count {running[-1]}"


def _single(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _family(f"kdray_{name}", kind, text)
    yield f"kdray_{name} {value}"


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
