"""Ops against ReferenceOps, op by op, on inputs as awkward as they come.

Used for the kernels on a GPU and for their source on the CPU: each check makes its inputs on the
CPU, runs the reference there and the ops under test where those live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.request import SamplingParams
from kdray.core.tree import ABSENT, quantise
from kdray.kernels.attention_batch import AttentionBatch
from kdray.kernels.cuda import CudaOps
from kdray.kernels.ops import SamplingRows
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_trees import break_trees, random_trees, walking_target

REFERENCE = ReferenceOps(torch.device("cpu"))
KINDS = ("normal", "ties", "holes")

# A log-sum-exp in float32 may round otherwise: 4e-6 nat, in units of the fixed point.
SCORE_UNITS = 16

WISHES = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all three": SamplingParams(temperature=0.7, top_k=40, top_p=0.95, min_p=0.01),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
    ),
    "end held back": SamplingParams(temperature=0.0, min_tokens=10),
    "bias": SamplingParams(temperature=0.0, logit_bias=((3, 50.0), (7, -2.0))),
}


def awkward_logits(rng: np.random.Generator, shape: Sequence[int], kind: str) -> Tensor:
    """Normal, on a coarse grid of ties, or with numbers that are none."""
    values = rng.normal(0.0, 3.0, shape).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    if kind == "holes":
        which = rng.random(shape)
        values[which < 0.2] = -np.inf
        values[(which >= 0.2) & (which < 0.25)] = np.nan
        values[(which >= 0.25) & (which < 0.2501)] = np.inf
    return torch.from_numpy(values)


def check_topk(ops: CudaOps, shape: Sequence[int], k: int, dtype: torch.dtype, kind: str) -> None:
    logits = awkward_logits(np.random.default_rng(1), shape, kind).to(dtype)
    token, score = ops.topk_logprob(logits.to(ops.device), k)
    expected_token, expected_score = REFERENCE.topk_logprob(logits, k)
    assert token.dtype == score.dtype == torch.int32
    assert token.shape == score.shape == expected_token.shape
    absent = expected_score == ABSENT
    assert torch.equal(score.cpu() == ABSENT, absent)
    assert torch.equal(token.cpu()[~absent], expected_token[~absent])
    difference = (score.cpu().long() - expected_score.long())[~absent].abs()
    assert difference.max().item() <= SCORE_UNITS if len(difference) else absent.all()


def awkward_candidates(
    rng: np.random.Generator, requests: int, depth: int, width: int, grid: float
) -> Candidates:
    """Sorted rows with ties, absent ends, rows without any, and sums that saturate."""
    scale = rng.choice([0.5, 2.0, 12.0], (requests, depth, 1))
    logprob = -np.sort(np.round(rng.exponential(scale, (requests, depth, width)) / grid) * grid)
    logprob[rng.random(logprob.shape) < 0.1] = -np.inf
    logprob[rng.random((requests, depth)) < 0.03] = -np.inf
    score = -np.sort(-quantise(logprob).astype(np.int64)).astype(np.int32)
    token = rng.integers(0, 50, score.shape).astype(np.int32)
    return Candidates(token=torch.from_numpy(token), score=torch.from_numpy(score))


def check_trees(ops: CudaOps, depth: int, width: int, budgets: Sequence[int], grid: float) -> None:
    """Every column of every node equal, padding too."""
    rng = np.random.default_rng(len(budgets) + depth)
    given = awkward_candidates(rng, len(budgets), depth, width, grid)
    roots = torch.arange(100, 100 + len(budgets), dtype=torch.int32)
    expected = REFERENCE.build_trees(given, roots, budgets)
    moved = Candidates(token=given.token.to(ops.device), score=given.score.to(ops.device))
    got = ops.build_trees(moved, roots.to(ops.device), budgets)
    for field in fields(DraftTrees):
        column = getattr(got, field.name)
        assert column.dtype == torch.int32 and column.device == ops.device
        assert torch.equal(column.cpu(), getattr(expected, field.name)), field.name


def check_sampling(ops: CudaOps, names: Sequence[str], rows: int, vocab: int, kind: str) -> None:
    """The same token in every row; row i is drawn as names[i % len(names)] says."""
    rng = np.random.default_rng(11)
    params = [WISHES[names[i % len(names)]] for i in range(rows)]
    addressed = SamplingRows(
        params=params,
        seed=rng.integers(0, 2**63, rows).tolist(),
        position=rng.integers(0, 2**20, rows).tolist(),
        history=[
            (rng.integers(0, vocab, 20).tolist(), rng.integers(0, vocab, 9).tolist())
            if wish.uses_history
            else None
            for wish in params
        ],
        end_token_ids=[frozenset(rng.integers(0, vocab, 3).tolist()) for _ in params],
    )
    logits = awkward_logits(rng, (rows, vocab), kind)
    token = ops.sample_tokens(logits.to(ops.device), addressed)
    assert token.dtype == torch.int32 and token.device == ops.device
    assert torch.equal(token.cpu(), REFERENCE.sample_tokens(logits, addressed))


def check_dead_rows(ops: CudaOps) -> None:
    """The first row without a finite logit is named."""
    logits = torch.zeros(3, 40)
    logits[1] = -torch.inf
    rows = SamplingRows(
        params=[WISHES["greedy"], WISHES["warm"], WISHES["greedy"]],
        seed=[1, 2, 3],
        position=[4, 5, 6],
        history=[None] * 3,
        end_token_ids=[frozenset()] * 3,
    )
    for some, device in ((ops, ops.device), (REFERENCE, REFERENCE.device)):
        with pytest.raises(ValueError, match="row 1: no finite logit is left to draw from"):
            some.sample_tokens(logits.to(device), rows)


def check_paths(ops: CudaOps, requests: int, nodes: int) -> None:
    """Sound trees, broken ones, and sound ones as ranks unpack them: views of a wide tensor."""
    rng = np.random.default_rng(nodes)
    sound = random_trees(rng, requests, nodes, bushy=0.4)
    target = walking_target(rng, sound, far=0.9)
    drawn = target.to(ops.device)
    wide = torch.cat([sound.token, sound.parent, target], dim=1).to(ops.device)
    token, parent, view = wide.split(nodes, dim=1)
    views = replace(on(ops.device, sound), token=token, parent=parent)
    broken = break_trees(rng, sound)
    for trees, given, given_target in (
        (sound, on(ops.device, sound), drawn),
        (broken, on(ops.device, broken), drawn),
        (sound, views, view),
    ):
        expected = REFERENCE.accept_paths(trees, target, 7)
        got = ops.accept_paths(given, given_target, 7)
        for field in fields(got):
            assert torch.equal(getattr(got, field.name).cpu(), getattr(expected, field.name))


def on(device: torch.device, trees: DraftTrees) -> DraftTrees:
    return DraftTrees(**{f.name: getattr(trees, f.name).to(device) for f in fields(trees)})


def check_commit(ops: CudaOps, moves: int) -> None:
    """Caches the kernels move, and some (odd rows, views, too many rows) they leave to torch."""
    generator = torch.Generator().manual_seed(moves)
    rows = moves + 10
    hosts = [
        torch.randn(rows, 576, generator=generator).bfloat16(),
        torch.randn(rows, 3, generator=generator),
        torch.randn(rows, 3, generator=generator).bfloat16(),
        torch.randn(rows, 2, 2, 8, generator=generator),
        torch.randn(6, rows, generator=generator).T,
    ]
    caches = [host.clone().to(ops.device) for host in hosts]
    target = torch.randperm(rows, generator=generator)[:moves]
    source = target.roll(1)
    REFERENCE.commit_kv(hosts, source, target)
    ops.commit_kv(caches, source.to(ops.device), target.to(ops.device))
    for cache, host in zip(caches, hosts, strict=True):
        assert torch.equal(cache.cpu(), host)
    ops.commit_kv([], source.to(ops.device), target.to(ops.device))


def check_attention(ops: CudaOps) -> None:
    """Three known rows and three drafts, two of them on one branch."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(6, 2, 24, generator=generator)
    cache = torch.randn(64, 24, generator=generator)

    def batch(device: torch.device) -> AttentionBatch:
        return AttentionBatch(
            row_start=(0, 6),
            num_cached=(9,),
            num_known=(3,),
            page_table=torch.arange(8, dtype=torch.int32, device=device)[None],
            page_size=4,
            mask=torch.tensor([[1, 3, 5, 11]], dtype=torch.int32, device=device)[..., None],
        )

    expected = REFERENCE.verify_attention(query, cache, batch(REFERENCE.device), 0.2, 16)
    moved = query.to(ops.device), cache.to(ops.device)
    got = ops.verify_attention(*moved, batch(ops.device), 0.2, 16)
    assert torch.allclose(got.cpu(), expected, atol=1e-4)
