"""Assumed acceptance in captured rounds: the CPU's draws, whatever the logits are."""

from __future__ import annotations

import pytest
import torch

from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import DraftTrees
from kdray.kernels.graphs import record
from kdray.verifier.synthetic import AssumedTokens
from tests.test_synthetic_acceptance import accept_lengths, config_of

pytestmark = pytest.mark.gpu

PROFILE = AcceptanceProfile.of((0.7, 0.5), (0.5, 0.2), 0.3, depth=7)


def test_a_captured_round_assumes_what_the_cpu_does(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    requests, nodes = 64, 17
    parent = torch.stack([torch.randint(-1, n, (requests,), generator=generator).clamp_min(0)
                          for n in range(nodes)], dim=1).int()  # fmt: skip
    parent[:, 0] = -1
    depth = torch.zeros_like(parent)
    for node in range(1, nodes):
        depth[:, node] = depth.gather(1, parent[:, node : node + 1].long())[:, 0] + 1
    depth.clamp_max_(7)
    numbers = torch.randint(0, 500, (2, requests, nodes), generator=generator, dtype=torch.int32)
    trees = DraftTrees(
        token=numbers[0],
        parent=parent,
        depth=depth,
        score=numbers[0],
        mask=numbers[0][:, :, None],
        num_nodes=torch.randint(1, nodes + 1, (requests,), generator=generator).int(),
    )
    place = torch.randint(0, 9999, (requests,), generator=generator).int()
    seed = torch.randint(0, 1 << 62, (requests,), generator=generator)
    wanted = AssumedTokens(PROFILE, 500, torch.device("cpu")).tokens(trees, numbers[1], place, seed)
    assumed = AssumedTokens(PROFILE, 500, device)
    there = DraftTrees(**{name: getattr(trees, name).to(device) for name in DraftTrees.__slots__})
    said, place, seed = (one.to(device) for one in (numbers[1], place, seed))
    found = torch.zeros_like(said)
    record(lambda: found.copy_(assumed.tokens(there, said, place, seed)), None)()
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_an_engine_gains_what_the_profile_says(mode: str) -> None:
    lengths, engine = accept_lengths(config_of(mode=mode, budget=7, device="cuda"))
    assert engine.facts.acceptance is not None
    wanted = engine.facts.acceptance.length(mode, 8)
    got = sum(length * count for length, count in lengths.items()) / lengths.total()
    assert got == pytest.approx(wanted, abs=0.16)
