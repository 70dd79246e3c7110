"""Passes over prompts recorded as CUDA graphs, against launches of just these rows."""

from __future__ import annotations

import pytest
import torch

from kdray.kernels.graphs import shared_pool
from tests.verifier.prompt_plans import roots_of, slots_of, steps, verifiers

pytestmark = pytest.mark.gpu


def test_replays_say_what_launches_say(device: torch.device) -> None:
    passing, launching = verifiers(device)
    assert passing.prompts is not None
    assert passing.prompts.capture(shared_pool(device)) > 0
    done = []
    for plan in [*steps(), *steps()]:  # again over what is there: the same numbers
        done.append(plan)
        trees = roots_of(plan, device)
        mine, other = (v.verify(plan, trees) for v in (passing, launching))
        assert torch.equal(mine.token, other.token) and mine.broken == other.broken == frozenset()
        torch.testing.assert_close(mine.features, other.features, rtol=1e-3, atol=1e-3)
        written = slots_of(done)
        for cache, wanted in zip(passing.cache.layers, launching.cache.layers, strict=True):
            torch.testing.assert_close(cache[written], wanted[written], rtol=1e-3, atol=1e-3)
            others = torch.ones(len(cache), dtype=torch.bool, device=device)
            others[written] = False
            others[-passing.cache.page_size :] = False  # the spare page takes the padding
            assert not cache[others].any()
    del passing, launching  # with their graphs
