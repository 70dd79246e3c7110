"""Planned steps for a verifier with passes and for one without, over the demo's target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kdray.config import EngineConfig
from kdray.core.plan import Candidates, DraftTrees, PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.engine import build_verifier, resolve
from kdray.kernels.ops import load_ops
from kdray.kernels.round_ops import load_round_ops
from kdray.verifier.verifier import Verifier

PAGE_SIZE, PAGES_EACH, REQUESTS, CHUNK = 16, 24, 4, 300
BUDGET, DEPTH, CANDIDATES = 6, 3, 4
VOCAB = 500  # of which tokens are drawn


def verifiers(device: torch.device, **wishes: object) -> tuple[Verifier, Verifier]:
    """With passes and without: alike, with a cache each. wishes: of an EngineConfig."""
    config = EngineConfig(
        device=device.type,  # type: ignore[arg-type]
        budget=BUDGET,
        max_requests=REQUESTS,
        max_model_len=PAGES_EACH * PAGE_SIZE,
        prefill_chunk=CHUNK,
        page_size=PAGE_SIZE,
        num_pages=REQUESTS * PAGES_EACH,
        **({"dtype": "float32"} | wishes),  # type: ignore[arg-type]
    )
    facts, ops, rounds = resolve(config), load_ops(device), load_round_ops(device)
    launching = build_verifier(config, facts, ops, taps=(0, 2))
    passing = build_verifier(config, facts, ops, taps=(0, 2), round_ops=rounds)
    assert passing.passes is not None and launching.passes is None
    return passing, launching


def planned(slot: int, cached: int, count: int, *, budget: int = 0) -> PlannedRequest:
    """A request's next `count` tokens; its pages lie across those of the others."""
    known = np.random.default_rng(1000 * slot + cached).integers(3, VOCAB, count)
    return PlannedRequest(
        request_id=f"r{slot}",
        slot=slot,
        num_cached=cached,
        known=known.astype(np.int32),
        budget=budget,
        pages=np.arange(slot, REQUESTS * PAGES_EACH, REQUESTS, dtype=np.int32),
        samples=slot != 1,
        sampling=SamplingParams(temperature=0.0),
        seed=slot,
        num_prompt=cached + count,
    )


def steps() -> Iterator[StepPlan]:
    """Requests of all lengths side by side, each behind what it has cached; some draft."""
    cached = [0] * REQUESTS
    for number, counts in enumerate([
        (17, 0, 0, 0), (1, 40, 9, 150), (2, 3, 1, 1),
        (0, 0, 290, 5), (31, 31, 31, 31), (0, 32, 0, 0),
    ]):  # fmt: skip
        rows = [
            planned(r, cached[r], count, budget=BUDGET - r if count == 1 else 0)
            for r, count in enumerate(counts)
            if count
        ]
        cached = [done + count for done, count in zip(cached, counts, strict=True)]
        yield StepPlan(step=number, requests=tuple(rows))


def check_steps(passing: Verifier, launching: Verifier, *, exact: bool) -> None:
    """Both say, write and tap the same, and a pass touches nothing else but the spare page.

    exact: up to the order of sums in float32; else in bf16, where rounding sends many a row of
    random weights to other experts: most rows, and loosely
    """
    device = passing.cache.layers[0].device
    done: list[StepPlan] = []
    for plan in [*steps(), *steps()]:  # again over what is there: the same numbers
        done.append(plan)
        trees = trees_of(plan, device)
        mine, other = (verifier.verify(plan, trees) for verifier in (passing, launching))
        assert mine.broken == other.broken == frozenset()
        check_rows(mine.features, other.features, exact=exact)
        if exact:
            assert torch.equal(mine.token, other.token)
        written = slots_of(done)
        for cache, wanted in zip(passing.cache.layers, launching.cache.layers, strict=True):
            if cache.dtype != torch.uint8:  # rows in fp8 hold codes and scales
                check_rows(cache[written], wanted[written], exact=exact)
            others = torch.ones(len(cache), dtype=torch.bool, device=device)
            others[written] = False
            others[-PAGE_SIZE:] = False
            assert not cache[others].any(), "what no request has run stays as it was"


def check_rows(found: Tensor, wanted: Tensor, *, exact: bool) -> None:
    if exact:
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        return
    size = wanted.float().norm(dim=1).clamp_min(1e-6)  # a tree may be smaller than its budget
    off = (found.float() - wanted.float()).norm(dim=1) / size
    assert off.isfinite().all() and off.quantile(0.6) < 0.04, off


def trees_of(plan: StepPlan, device: torch.device) -> DraftTrees:
    """Of random candidates, for those that draft."""
    generator = torch.Generator().manual_seed(plan.step)
    shape = (len(plan.requests), DEPTH, CANDIDATES)
    token = torch.randint(3, VOCAB, shape, generator=generator, dtype=torch.int32)
    score = -torch.randint(1, 1 << 23, shape, generator=generator, dtype=torch.int32)
    score = score.sort(dim=-1, descending=True).values
    roots = torch.from_numpy(plan.roots).to(device)
    candidates = Candidates(token=token.to(device), score=score.to(device))
    return load_ops(device).build_trees(candidates, roots, [r.budget for r in plan.requests])


def slots_of(plans: Sequence[StepPlan]) -> list[int]:
    """Every cache slot that the plans write, drafts' included."""
    found: list[int] = []
    for request in (request for plan in plans for request in plan.requests):
        rows = len(request.known) + request.budget
        place = request.num_cached + np.arange(rows, dtype=np.int64)
        found += request.slots_at(place, PAGE_SIZE).tolist()
    return found
