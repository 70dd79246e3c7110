"""An engine's figures at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kdray.driver.driver import Driver

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverStats:
    """A snapshot between two steps. Seconds and counts since the start.

    prompt_steps     steps that ran prompts, which hold up those who decode
    accept_lengths   accept length -> speculative steps of single requests that gained so many
    tree_nodes       draft nodes -> trees of so many
    stage_seconds    verb -> wall-clock seconds
    rank_ages_s      rank -> seconds since its last sign of life; ranks without any are missing
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prompt_steps: int = 0
    verified_rows: int = 0
    preemptions: int = 0
    accept_lengths: dict[int, int] = field(default_factory=dict)
    tree_nodes: dict[int, int] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    rank_ages_s: dict[int, float] = field(default_factory=dict)

    def behind(self, before: DriverStats) -> DriverStats:
        """With the totals of an engine before this one added; what is a gauge stays this one's."""
        return replace(
            self,
            prompt_tokens=before.prompt_tokens + self.prompt_tokens,
            generated_tokens=before.generated_tokens + self.generated_tokens,
            steps=before.steps + self.steps,
            prompt_steps=before.prompt_steps + self.prompt_steps,
            verified_rows=before.verified_rows + self.verified_rows,
            preemptions=before.preemptions + self.preemptions,
            accept_lengths=_sum(before.accept_lengths, self.accept_lengths),
            tree_nodes=_sum(before.tree_nodes, self.tree_nodes),
            stage_seconds=_sum(before.stage_seconds, self.stage_seconds),
        )


def snapshot(driver: Driver) -> DriverStats:
    """The driver's counters and gauges as they are now."""
    counters, scheduler = driver.counters, driver.scheduler
    return DriverStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        pages_used=scheduler.pages.num_used,
        pages_total=scheduler.pages.num_pages,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        steps=counters.steps,
        prompt_steps=counters.prompt_steps,
        verified_rows=counters.verified_rows,
        preemptions=scheduler.num_preemptions,
        accept_lengths=dict(counters.accept_lengths),
        tree_nodes=dict(counters.tree_nodes),
        stage_seconds=dict(driver.clock.seconds),
    )


def _sum(one: Mapping[Key, Number], other: Mapping[Key, Number]) -> dict[Key, Number]:
    total = dict(one)
    for key, value in other.items():
        total[key] = total[key] + value if key in total else value
    return total
