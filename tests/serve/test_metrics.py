"""The metrics page is Prometheus text, and counts what happened."""

from __future__ import annotations

import time

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from kdray.core.events import EVENTS
from kdray.driver.step_loop import DriverStats
from kdray.serve.families import Histogram, as_text
from kdray.serve.metrics import ServiceMetrics, families
from tests.serve.conftest import BuildApp
from tests.serve.fakes import STATS, FakeEngine, running, steps
from tests.serve.http import call, complete

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(app: FastAPI) -> Samples:
    response = call(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(response.text)


def parsed(page: str) -> Samples:
    """Every sample by name and sorted labels; each family has help, a type, and no twin."""
    samples: Samples = {}
    for family in text_string_to_metric_families(page):
        assert family.name.startswith("kdray_")
        assert family.documentation and family.type != "unknown"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"kdray_{name}", tuple(sorted(labels.items()))]


def test_what_the_engine_says(app_of: BuildApp) -> None:
    samples = scrape(app_of(FakeEngine()))
    assert value(samples, "engine_up") == 1
    assert value(samples, "requests_running") == STATS.running
    assert value(samples, "requests_waiting") == STATS.waiting
    assert value(samples, "pages_used") == STATS.pages_used
    assert value(samples, "pages_total") == STATS.pages_total
    assert value(samples, "steps_total") == STATS.steps
    assert value(samples, "step_seconds_total", verb="verify") == 1.5
    assert value(samples, "kv_use_ratio") == pytest.approx(7 / 64)
    assert value(samples, "rank_heartbeat_age_seconds", rank="1") == 0.25


def test_an_endpoint_says_since_when_it_counts(app_of: BuildApp) -> None:
    before = int(time.time())
    app = app_of(FakeEngine())
    began = value(scrape(app), "start_time_seconds")
    assert before <= began <= time.time()
    assert value(scrape(app), "start_time_seconds") == began


def test_accept_lengths_are_a_histogram(app_of: BuildApp) -> None:
    samples = scrape(app_of(FakeEngine()))
    buckets = {
        dict(labels)["le"]: count
        for (name, labels), count in samples.items()
        if name == "kdray_accept_length_bucket"
    }
    assert buckets == {"1": 3, "2": 3, "3": 3, "4": 8, "+Inf": 8}
    assert value(samples, "accept_length_sum") == 3 * 1 + 5 * 4
    assert value(samples, "accept_length_count") == 8


def test_acceptance_by_depth_is_read_off_the_lengths(app_of: BuildApp) -> None:
    samples = scrape(app_of(FakeEngine()))
    reached = [value(samples, "accepted_at_depth_total", depth=str(d)) for d in (1, 2, 3)]
    assert reached == [5, 5, 5]  # the three of length 1 accepted no draft
    assert ("kdray_accepted_at_depth_total", (("depth", "4"),)) not in samples


def test_nodes_a_tree_in_powers_of_two(app_of: BuildApp) -> None:
    samples = scrape(app_of(FakeEngine()))
    below = [value(samples, "tree_nodes_bucket", le=le) for le in ("2", "4", "8", "16", "+Inf")]
    assert below == [0, 2, 2, 8, 8]
    assert value(samples, "tree_nodes_sum") == 2 * 3 + 6 * 16


def test_faults_are_shown_from_the_start(app_of: BuildApp) -> None:
    engine = FakeEngine()
    engine.events.add("replayed_requests_total", 3)
    samples = scrape(app_of(engine))
    assert {name: value(samples, name) for name in EVENTS} == dict.fromkeys(EVENTS, 0) | {
        "replayed_requests_total": 3
    }


def test_refusals_and_statuses_are_counted(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(steps("a")))
    for temperature in (-1, 0, "hot"):
        complete(app, temperature=temperature)
    call(app, "GET", "/nowhere")
    samples = scrape(app)
    assert value(samples, "refused_requests_total", code="invalid_value") == 2
    assert value(samples, "http_responses_total", status="400") == 2
    assert value(samples, "http_responses_total", status="200") == 1
    assert value(samples, "http_responses_total", status="404") == 1


def test_what_the_surface_counts(app_of: BuildApp) -> None:
    app = app_of(FakeEngine(lambda i: steps("abc", "de") if i else running("a.")))
    complete(app, prompt="hi", n=2, stop=".")
    complete(app, prompt="hello", stream=True)
    samples = scrape(app)
    assert value(samples, "requests_total", finish_reason="length") == 2
    assert value(samples, "requests_total", finish_reason="stop") == 1
    assert value(samples, "requests_total", finish_reason="abort") == 0
    assert value(samples, "prompt_tokens_total") == 2 + 2 + 5
    assert value(samples, "generation_tokens_total") == 2 + 5 + 5
    assert value(samples, "time_to_first_token_seconds_count") == 3
    assert value(samples, "request_seconds_count") == 2
    assert value(samples, "requests_open") == value(samples, "requests_queued") == 0
    assert value(samples, "queued_prompt_tokens") == 0
    # One choice had a single step: there is no time between its tokens.
    assert value(samples, "time_per_output_token_seconds_count") == 2


def test_an_engine_that_is_down_leaves_the_rest_readable(app_of: BuildApp) -> None:
    engine = FakeEngine()
    engine.cause = "rank 1 died"
    samples = scrape(app_of(engine))
    assert value(samples, "engine_up") == 0
    assert ("kdray_steps_total", ()) not in samples


def test_a_fresh_engine_has_an_empty_histogram() -> None:
    samples = parsed(as_text(families(ServiceMetrics(), DriverStats(), {})))
    assert value(samples, "accept_length_count") == 0
    assert value(samples, "accept_length_bucket", le="+Inf") == 0


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram([1.0, 2.0])
    for seconds in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(seconds)
    samples = parsed(as_text([histogram.family("x_seconds", "X.")]))
    assert value(samples, "x_seconds_bucket", le="1.0") == 2
    assert value(samples, "x_seconds_bucket", le="2.0") == 4
    assert value(samples, "x_seconds_bucket", le="+Inf") == 5
    assert value(samples, "x_seconds_sum") == 14.0
