"""CudaOps equals ReferenceOps op by op, on inputs as awkward as they come."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.request import SamplingParams
from kdray.core.tree import ABSENT, quantise
from kdray.integrations.sglang import build_ddtree_trees_from_topk
from kdray.kernels.cuda import CudaOps
from kdray.kernels.ops import AttentionBatch, Ops, SamplingRows
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_trees import break_trees, random_trees, walking_target

pytestmark = pytest.mark.gpu

# A log-sum-exp in float32 may round otherwise: 4e-6 nat, in units of the fixed point.
SCORE_UNITS = 16


@pytest.fixture(scope="module")
def ops(device: torch.device) -> CudaOps:
    return CudaOps(device)


@pytest.fixture(scope="module")
def reference() -> ReferenceOps:
    return ReferenceOps(torch.device("cpu"))


def awkward_logits(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Tensor:
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


@pytest.mark.parametrize("kind", ["normal", "ties", "holes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "k"), [((1, 1), 1), ((3, 7, 1000), 16), ((2, 5, 33), 64), ((9, 20_011), 8)]
)
def test_topk_logprob(
    ops: CudaOps,
    reference: ReferenceOps,
    shape: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    kind: str,
) -> None:
    logits = awkward_logits(np.random.default_rng(1), shape, kind).to(dtype)
    token, score = ops.topk_logprob(logits.to(ops.device), k)
    expected_token, expected_score = reference.topk_logprob(logits, k)
    assert token.dtype == score.dtype == torch.int32 and token.shape == (*shape[:-1], k)
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


@pytest.mark.parametrize("grid", [0.5, 1e-6], ids=["ties", "no ties"])
@pytest.mark.parametrize("depth", [0, 1, 7, 15])
@pytest.mark.parametrize(
    ("width", "budgets"),
    [
        (1, [0]),
        (16, [0, 0]),
        (16, [7, 8, 1, 0, 3]),
        (64, [31, 32, 33, 16]),
        (17, [63, 64, 65, 2]),
        (32, [128, 100, 5]),
        (64, [256, 300, 0]),
        (64, [1024, 31]),
    ],
    ids=str,
)
def test_build_trees(
    ops: CudaOps,
    reference: ReferenceOps,
    width: int,
    budgets: list[int],
    depth: int,
    grid: float,
) -> None:
    rng = np.random.default_rng(len(budgets) + depth)
    given = awkward_candidates(rng, len(budgets), depth, width, grid)
    roots = torch.arange(100, 100 + len(budgets), dtype=torch.int32)
    expected = reference.build_trees(given, roots, budgets)
    moved = Candidates(token=given.token.to(ops.device), score=given.score.to(ops.device))
    got = ops.build_trees(moved, roots.to(ops.device), budgets)
    assert_trees_equal(got, expected)


def assert_trees_equal(got: DraftTrees, expected: DraftTrees) -> None:
    for field in fields(DraftTrees):
        column, wanted = getattr(got, field.name), getattr(expected, field.name)
        assert column.dtype == torch.int32
        assert torch.equal(column.cpu(), wanted), field.name


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
    "bias": SamplingParams(temperature=0.0, logit_bias=((3, 50.0), (7, -2.0))),
}


@pytest.mark.parametrize("name", [*WISHES, "mixed"])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_sample_tokens(ops: CudaOps, reference: ReferenceOps, name: str, kind: str) -> None:
    rng = np.random.default_rng(11)
    rows, vocabulary = 40, 3001
    wishes = list(WISHES.values()) if name == "mixed" else [WISHES[name]]
    params = [wishes[i % len(wishes)] for i in range(rows)]
    history = [
        (rng.integers(0, vocabulary, 20).tolist(), rng.integers(0, vocabulary, 9).tolist())
        if wish.uses_history
        else None
        for wish in params
    ]
    addressed = SamplingRows(
        params=params,
        seed=rng.integers(0, 2**63, rows).tolist(),
        position=rng.integers(0, 2**20, rows).tolist(),
        history=history,
        end_token_ids=[frozenset({1})] * rows,
    )
    logits = awkward_logits(rng, (rows, vocabulary), kind)
    token = ops.sample_tokens(logits.to(ops.device), addressed)
    assert token.dtype == torch.int32 and token.device == ops.device
    assert torch.equal(token.cpu(), reference.sample_tokens(logits, addressed))


def test_no_rows_draw_no_tokens(ops: CudaOps) -> None:
    nothing = SamplingRows(params=[], seed=[], position=[], history=[], end_token_ids=[])
    assert ops.sample_tokens(torch.zeros(0, 50, device=ops.device), nothing).shape == (0,)


@pytest.mark.parametrize("nodes", [1, 9, 33, 257])
def test_accept_paths(ops: CudaOps, reference: ReferenceOps, nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    sound = random_trees(rng, 30, nodes, bushy=0.4)
    target = walking_target(rng, sound, far=0.9)
    for trees in (sound, break_trees(rng, sound)):
        expected = reference.accept_paths(trees, target, 7)
        moved = on(ops.device, trees)
        got = ops.accept_paths(moved, target.to(ops.device), 7)
        for field in fields(got):
            assert torch.equal(getattr(got, field.name).cpu(), getattr(expected, field.name))


def test_accept_paths_takes_views(ops: CudaOps, reference: ReferenceOps) -> None:
    """As ranks unpack trees: columns of one wide tensor."""
    rng = np.random.default_rng(2)
    trees = random_trees(rng, 8, 17, bushy=0.4)
    target = walking_target(rng, trees, far=0.9)
    wide = torch.cat([trees.token, trees.parent, target], dim=1).to(ops.device)
    token, parent, drawn = wide.split(17, dim=1)
    views = replace(on(ops.device, trees), token=token, parent=parent)
    got = ops.accept_paths(views, drawn, 5)
    assert torch.equal(got.node.cpu(), reference.accept_paths(trees, target, 5).node)


def on(device: torch.device, trees: DraftTrees) -> DraftTrees:
    return DraftTrees(**{f.name: getattr(trees, f.name).to(device) for f in fields(trees)})


@pytest.mark.parametrize("moves", [0, 1, 40, 5000])
def test_commit_kv(ops: CudaOps, moves: int) -> None:
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
    ReferenceOps(torch.device("cpu")).commit_kv(hosts, source, target)
    ops.commit_kv(caches, source.to(ops.device), target.to(ops.device))
    for cache, host in zip(caches, hosts, strict=True):
        assert torch.equal(cache.cpu(), host)
    ops.commit_kv([], source.to(ops.device), target.to(ops.device))


def test_verify_attention(ops: CudaOps, reference: ReferenceOps) -> None:
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(6, 2, 24, generator=generator)
    cache = torch.randn(64, 24, generator=generator)
    mask = torch.tensor([[1, 3, 5, 11]], dtype=torch.int32)[..., None]
    shape = {"row_start": (0, 6), "num_cached": (9,), "num_known": (3,), "page_size": 4}
    pages = torch.arange(8, dtype=torch.int32)[None]
    out = [
        some.verify_attention(
            query.to(device),
            cache.to(device),
            AttentionBatch(**shape, page_table=pages.to(device), mask=mask.to(device)),
            0.2,
            16,
        ).cpu()
        for some, device in pair(ops, reference)
    ]
    assert torch.allclose(out[0], out[1], atol=1e-4)


def pair(ops: CudaOps, reference: ReferenceOps) -> list[tuple[Ops, torch.device]]:
    return [(ops, ops.device), (reference, reference.device)]


def test_sglang_trees_from_cuda_tensors_equal_those_from_cpu_tensors(ops: CudaOps) -> None:
    generator = torch.Generator().manual_seed(5)
    best = torch.randn(9, 7, 500, generator=generator).mul(3).log_softmax(-1).topk(16, dim=-1)
    budgets = [16, 1, 0, 33, 64, 8, 8, 200, 5]
    expected = build_ddtree_trees_from_topk(best.values, best.indices, budgets)
    got = build_ddtree_trees_from_topk(
        best.values.to(ops.device), best.indices.to(ops.device), budgets
    )
    for tree, wanted in zip(got, expected, strict=True):
        for value, other in zip(tree, wanted, strict=True):
            same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
            assert same
