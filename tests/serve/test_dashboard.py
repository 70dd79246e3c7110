"""The dashboard, the scrape configuration and the page on metrics name what is exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdray.core.events import EventCounters
from kdray.serve.families import PREFIX, Family
from kdray.serve.metrics import ServiceMetrics, families
from tests.serve.fakes import STATS
from tests.serve.promql import parse

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "cluster" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def exported() -> list[Family]:
    """Every family, with every label it can carry."""
    service = ServiceMetrics()
    service.refused("too_many_requests")
    service.responded(200)
    return list(families(service, STATS, EventCounters().totals()))


def labels_by_sample() -> dict[str, set[str]]:
    """Sample name -> its labels."""
    return {
        family.name + sample.suffix: {name for name, _ in sample.labels}
        for family in exported()
        for sample in family.samples
        if sample.suffix != "_bucket" or sample.labels
    }


def resolved(expression: str, prefix: str = PREFIX) -> str:
    return expression.replace("${prefix}", prefix)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_expression_parses_and_reads_what_is_exported(expression: str) -> None:
    known = labels_by_sample()
    parsed = parse(resolved(expression))
    assert parsed.selectors
    carried: set[str] = set()
    for selector in parsed.selectors:
        assert selector.metric in known
        assert selector.labels <= known[selector.metric]
        carried |= known[selector.metric]
    assert parsed.labels <= carried


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_counters_are_read_as_rates_and_gauges_as_they_are(expression: str) -> None:
    gauges = {family.name for family in exported() if family.kind == "gauge"}
    for selector in parse(resolved(expression)).selectors:
        assert selector.has_range == (selector.metric not in gauges)


def test_every_kind_of_fault_and_every_stage_has_a_panel() -> None:
    read = {s.metric for e in EXPRESSIONS for s in parse(resolved(str(e.values[0]))).selectors}
    unread = {name.removesuffix("_bucket") for name in labels_by_sample()} - {
        re.sub("_(bucket|sum|count)$", "", name) for name in read
    }
    unread = {name for name in unread if not name.endswith(("_sum", "_count"))}
    assert unread == {
        "kdray_http_responses_total",  # the refusals beside it say more
        "kdray_queued_prompt_tokens",
        "kdray_replayed_tokens_total",
        "kdray_start_time_seconds",  # for who subtracts totals
    }


def test_panels_have_places_and_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells


def test_both_prefixes_can_be_chosen() -> None:
    [variable] = [v for v in BOARD["templating"]["list"] if v["name"] == "prefix"]
    assert [option["value"] for option in variable["options"]] == [PREFIX, f"ray_{PREFIX}"]
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all("${prefix}" in target["expr"] for target in panel["targets"])


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "rate(x)",
        "sum(",
        "sum by (a (x)",
        "x y",
        "what(x[5m])",
        "x{a=1}",
        "x[5m",
        "1 +",
        "sum(rate(x[5m]) by le)",
    ],
)
def test_the_parser_refuses_what_is_no_expression(broken: str) -> None:
    with pytest.raises(ValueError):
        parse(broken)


def test_prometheus_scrapes_the_endpoint_and_ray() -> None:
    config: Any = yaml.safe_load((ROOT / "cluster" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["kdray"]["metrics_path"] == "/metrics"
    assert jobs["kdray"]["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    assert jobs["ray"]["file_sd_configs"][0]["files"][0].endswith(
        "prom_metrics_service_discovery.json"
    )


def documented() -> Iterator[str]:
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `kdray_"):
            yield line.split("`")[1].partition("{")[0]


def test_the_page_on_metrics_names_each_of_them_once() -> None:
    assert sorted(documented()) == sorted(family.name for family in exported())
