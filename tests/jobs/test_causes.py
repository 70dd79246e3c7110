"""What parts two replies: rounding, the experts it chose, or a fault that no rounding explains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import soak
import torch
from causes import WHOLE, Causes, lacking, lead
from judge import Judge
from record import Record
from traffic import Reply, Visit, demo_prompts

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.engine import resolve

CONFIG = EngineConfig(device="cpu", dtype="bfloat16", drafter="none")
GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def causes(judge: Judge) -> Causes:
    torch.set_num_threads(1)
    return Causes.of_config(CONFIG, judge.near_tie)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(CONFIG)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(prompt) for prompt in demo_prompts(resolve(CONFIG), each=1)]


def asking(prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> Visit:
    return Visit(prompt=prompt, sampling=sampling, pause=0, patience=None)


def leads(causes: Causes, visit: Visit, pair: tuple[int, int]) -> list[float]:
    """Of the dtype's passes with nudges, of pair[0] over pair[1], before any bias."""
    passed = [causes.passes.run(visit.prompt, WHOLE._replace(nudge=n)).logits for n in range(17)]
    return [float(logits[pair[0]] - logits[pair[1]]) for logits in passed]


def planted(causes: Causes, prompt: tuple[int, ...], shift: float = 0.0) -> tuple[Visit, list[int]]:
    """A visit whose bias puts the pair that rounding moves most level, and then apart by shift."""
    passed = [causes.passes.run(prompt, WHOLE._replace(nudge=n)).logits for n in range(17)]
    likely = np.argsort(-passed[0])[:10]
    _, a, b = max(
        (float(np.ptp([logits[a] - logits[b] for logits in passed])), int(a), int(b))
        for a in likely
        for b in likely
    )
    found = leads(causes, asking(prompt), (a, b))
    level = (min(found) + max(found)) / 2
    return asking(prompt, replace(GREEDY, logit_bias=((b, level - shift),))), [a, b]


def test_a_pair_that_rounding_moves_past_each_other_is_explained(
    causes: Causes, prompts: list[tuple[int, ...]]
) -> None:
    for prompt in prompts[:2]:
        visit, (a, b) = planted(causes, prompt[:20])
        cause = causes.of(visit, [a], [b])
        assert cause is not None and cause.lowest < 0 < cause.highest
        assert cause.lacking == 0 and cause.verdict(0.0) != "unexplained"
        assert cause.margin == pytest.approx(abs(cause.exact), abs=1e-6)


def test_the_same_pair_further_apart_is_not(
    causes: Causes, prompts: list[tuple[int, ...]], judge: Judge
) -> None:
    for prompt in prompts[2:3]:
        visit, (a, b) = planted(causes, prompt[:20], shift=4.0)
        cause = causes.of(visit, [a], [b])
        assert cause is not None and cause.lacking > judge.near_tie
        assert cause.margin == pytest.approx(judge.margin(visit, [a], [b]), abs=1e-3)
        assert cause.verdict(judge.near_tie) == "unexplained"


def test_a_narrow_choice_of_experts_is_named(
    causes: Causes, prompts: list[tuple[int, ...]]
) -> None:
    """At the token of all prompts whose last layer chooses most narrowly."""
    last = [causes.exact.run(prompt, WHOLE).gap[-1] for prompt in prompts]
    n = min(range(len(prompts)), key=lambda n: float(last[n].min()))
    token = int(last[n].argmin())
    visit, (a, b) = planted(causes, prompts[n][: token + 1])
    cause = causes.of(visit, [a], [b])
    assert cause is not None and cause.flips >= 1 and cause.first is not None
    assert cause.first[2] < 0.01 and cause.gaps[5] == pytest.approx(float(last[n].min()), abs=1e-4)
    assert cause.lacking == 0 < cause.lacking_told
    assert cause.verdict(cause.lacking_told / 2) == "experts"
    assert cause.verdict(cause.lacking_told) == "rounding"


def test_a_likely_token_that_is_not_the_target_s_stays_unexplained(
    causes: Causes, prompts: list[tuple[int, ...]], judge: Judge
) -> None:
    """Where the model is surest, the next likely token is what a reply has."""
    found = []
    for prompt in prompts:
        logits = causes.exact.run(prompt, WHOLE).logits
        best, second = (int(token) for token in np.argsort(-logits)[:2])
        found.append((float(logits[best] - logits[second]), prompt, best, second))
    margin, prompt, best, second = max(found)
    cause = causes.of(asking(prompt), [best], [second])
    assert cause is not None and cause.margin == pytest.approx(margin, abs=1e-4) and margin > 2
    assert cause.verdict(judge.near_tie) == "unexplained"


def test_a_reply_that_ends_early_has_no_cause(
    causes: Causes, prompts: list[tuple[int, ...]], judge: Judge
) -> None:
    visit = asking(prompts[0])
    margin, cause = soak.judged(visit, Reply([5, 6], "stop"), Reply([5], "stop"), judge, causes)
    assert cause is None and soak.Parting(0, margin, cause).verdict(1e9) == "unexplained"


def test_what_is_lacking_is_counted_of_the_worse_token() -> None:
    assert lead((0.0, 2.0)) == 2.0 and lead((1.5, 0.0)) == -1.5
    assert lacking([(0.0, 2.0), (0.0, 0.5)]) == 0.5
    assert lacking([(0.0, 2.0), (0.1, 0.0)]) == 0.0


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_job_fails_for_a_fault_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, judge: Judge, is_wrong: bool
) -> None:
    """One token of one reply of the last way is another likely one."""
    records: list[Record] = []
    honest, calls = soak.run_visits, []

    def run(driver: object, facts: object, visits: list[Visit]) -> list[Reply]:
        replies = honest(driver, facts, visits)  # type: ignore[arg-type]
        calls.append(replies)
        return faulty(visits, replies, judge) if is_wrong and len(calls) == 3 else replies

    class Kept(Record):
        def finish(self) -> None:
            records.append(self)

    monkeypatch.setattr(soak, "run_visits", run)
    monkeypatch.setattr(soak, "Record", Kept)
    arguments = ["--compare", "6", "--device", "cpu", "--ahead", "--dtype", "bfloat16"]
    assert soak.main([*arguments, "--mode", "chain", "--threads", "1"]) == is_wrong
    rows = [row for row in records[0]._rows if "verdict" in row["params"]]
    assert [row["params"]["verdict"] for row in rows] == 2 * is_wrong * ["unexplained"]


def faulty(visits: list[Visit], replies: list[Reply], judge: Judge) -> list[Reply]:
    for n, (visit, reply) in enumerate(zip(visits, replies, strict=True)):
        for token in range(40, 140):
            wrong = [*reply.token_ids[:-1], token]
            if visit.patience is None and 2 < judge.margin(visit, reply.token_ids, wrong) < 20:
                return [*replies[:n], Reply(wrong, reply.finish_reason), *replies[n + 1 :]]
    raise AssertionError("no token would be wrong")
