"""A whole device round's ops, one implementation against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees, RunningRows
from kdray.core.tree import ABSENT, quantise
from kdray.kernels.reference_round import ReferenceRoundOps
from kdray.kernels.round_ops import DrawRows, RoundOps, SlotState

REQUESTS, NODES, DEPTH, WIDTH, VOCAB, PAGE_SIZE = 5, 12, 6, 8, 300, 4
PAGES = 6


def draw_case(seed: int, device: torch.device) -> tuple[Candidates, RunningRows, Tensor, Tensor]:
    """Candidates, rows (the last one is padding), budgets, and logits of all R * N nodes."""
    rng = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=rng, dtype=torch.int32).to(device)

    logprob = torch.rand(REQUESTS, DEPTH, WIDTH, generator=rng).log()
    score = torch.from_numpy(quantise(logprob.sort(dim=2, descending=True).values.numpy()))
    score[:, :, -1] = ABSENT
    candidates = Candidates(token=ints(VOCAB, REQUESTS, DEPTH, WIDTH), score=score.to(device))
    pages = torch.randperm(REQUESTS * PAGES, generator=rng).int().view(REQUESTS, PAGES)
    heat = torch.tensor([0.0, 0.7, 1.3, 0.0, 1.0])
    rows = RunningRows(
        slot=torch.arange(REQUESTS, dtype=torch.int32, device=device),
        root=ints(VOCAB, REQUESTS),
        root_position=ints(6, REQUESTS),
        page_table=pages.to(device),
        page_size=PAGE_SIZE,
        temperature=heat.to(device),
        top_k=torch.tensor([0, 5, 0, 3, 0], dtype=torch.int32, device=device),
        top_p=torch.tensor([1.0, 1.0, 0.8, 1.0, 0.9], dtype=torch.float64, device=device),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1, 0.05], dtype=torch.float64, device=device),
        seed=torch.arange(REQUESTS, device=device) * 2**40 + seed,
    )
    budgets = torch.tensor([11, 3, 0, 40, 7], dtype=torch.int32, device=device)
    logits = 3 * torch.randn(REQUESTS * NODES, VOCAB, generator=rng)
    logits[7] = -torch.inf
    logits[19, :50] = torch.nan
    return candidates, rows, budgets, logits.to(device)


def check_round(ops: RoundOps, seed: int, device: torch.device) -> None:
    """Build, draw, accept, commit, advance: every result equal, padding nodes' draws left out."""
    reference = ReferenceRoundOps(device)
    candidates, rows, budgets, logits = draw_case(seed, device)
    both = (ops, reference)
    mine, other = (
        o.build_trees(candidates, rows.root, budgets, rows.root_position, NODES) for o in both
    )
    for name in ("token", "parent", "depth", "score", "mask", "num_nodes"):
        assert torch.equal(getattr(mine.trees, name), getattr(other.trees, name)), name
    assert torch.equal(mine.position, other.position)

    how = _draw_rows(rows, other.position)
    drawn, expected = (o.draw_tokens(logits, how) for o in both)
    assert torch.equal(drawn.token, expected.token) and torch.equal(drawn.dead, expected.dead)
    assert expected.dead.nonzero().flatten().tolist() == [7]

    target = _lucky(other.trees, expected.token.view(REQUESTS, NODES))
    paths, wanted = (o.accept_paths(other.trees, target, DEPTH) for o in both)
    assert torch.equal(paths.length, wanted.length) and torch.equal(paths.bonus, wanted.bonus)
    assert int(wanted.length.max()) > 1
    caches = [torch.randn(REQUESTS * PAGES * PAGE_SIZE, 8, device=device) for _ in range(2)]
    moved = [cache.clone() for cache in caches]
    ops.commit_paths(caches, paths, rows)
    reference.commit_paths(moved, wanted, rows)
    assert all(torch.equal(a, b) for a, b in zip(caches, moved, strict=True))

    slot = torch.tensor([3, 0, 6, 1, -1], dtype=torch.int32, device=device)
    states = [_state(device) for _ in both]
    for o, state in zip(both, states, strict=True):
        o.advance_requests(state, wanted, slot)
    assert torch.equal(states[0].root, states[1].root)
    assert torch.equal(states[0].root_position, states[1].root_position)
    assert states[0].root_position[3] == 10 + wanted.length[0]


def _draw_rows(rows: RunningRows, position: Tensor) -> DrawRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    each = {name: getattr(rows, name).repeat_interleave(NODES) for name in names}
    return DrawRows(**each, position=position.flatten() + 1, drops=True)


def _lucky(trees: DraftTrees, drawn: Tensor) -> Tensor:
    """The drawn tokens, but along the last node's path those of the tree."""
    target = drawn.clone()
    for r, count in enumerate(trees.num_nodes.tolist()):
        node = count - 1
        while node > 0:
            parent = int(trees.parent[r, node])
            target[r, parent] = trees.token[r, node]
            node = parent
    return target


def _state(device: torch.device) -> SlotState:
    return SlotState(
        root=torch.zeros(8, dtype=torch.int32, device=device),
        root_position=torch.full((8,), 10, dtype=torch.int32, device=device),
        page_table=torch.zeros(8, 1, dtype=torch.int32, device=device),
        page_size=PAGE_SIZE,
    )
