"""The steps that are timed: trees in a captured graph, and prompts both ways.

A tree step is what a device round calls `verify`, on the product's own trees; up to 65 rows are one
request's tree. More rows are those of several requests, MANY_REQUESTS, or fewer where their
contexts would not fit the KV pages together. From PROMPT_ROWS rows on the same number is also run
as a chunk of one prompt, launched kernel by kernel and as a captured pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from step_rank import Rank, with_passes
from torch import Tensor

from kdray.config import EngineConfig
from kdray.core.buckets import MOST_PASS_ROWS
from kdray.core.plan import (
    Candidates,
    DeviceVerified,
    DraftTrees,
    PlannedRequest,
    RunningRows,
    StepPlan,
    Verified,
)
from kdray.core.request import SamplingParams
from kdray.driver.running import Placement, RunningState
from kdray.kernels.graphs import shared_pool
from kdray.kernels.page_tables import PageTables
from kdray.verifier.verifier import Verifier

Int32Array = NDArray[np.int32]

WAYS = ("tree", "prompt", "pass")
ONE_TREE = 65
SLOTS = EngineConfig().max_requests
MANY_REQUESTS = {128: 8, 512: 32, 2048: 64}
ROWS_A_REQUEST = 16  # of other numbers of rows
PROMPT_ROWS = 64
SPREAD = 4.0  # of the drafter's logits: trees neither chains nor flat
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One row of the table. way: "tree", "prompt" or "pass", a prompt's captured; context: tokens
    cached, a request."""

    way: str
    tokens: int
    context: int
    requests: int

    @property
    def nodes(self) -> int:
        """Rows a request."""
        return self.tokens // self.requests


def cases(
    tokens: Sequence[int], contexts: Sequence[int], ways: Sequence[str], rank: Rank
) -> Iterator[StepCase]:
    has_passes = with_passes(rank, rank.config).passes is not None
    for context in contexts:
        for rows in tokens:
            if "tree" in ways:
                requests = requests_of(rows, context, rank.facts.num_pages, rank.config.page_size)
                yield StepCase(way="tree", tokens=rows, context=context, requests=requests)
        for rows in tokens:
            if rows < PROMPT_ROWS:
                continue
            if "prompt" in ways:
                yield StepCase(way="prompt", tokens=rows, context=context, requests=1)
            if "pass" in ways and rows <= MOST_PASS_ROWS and has_passes:
                yield StepCase(way="pass", tokens=rows, context=context, requests=1)


def requests_of(tokens: int, context: int, num_pages: int, page_size: int) -> int:
    """So many requests share the rows evenly."""
    if tokens <= ONE_TREE:
        return 1
    requests = MANY_REQUESTS.get(tokens, max(1, tokens // ROWS_A_REQUEST))
    while requests > 1:
        pages = -(-(context + tokens // requests) // page_size)
        if tokens % requests == 0 and requests * pages <= num_pages:
            break
        requests -= 1
    return requests


def fits(rank: Rank, requests: int, positions: int) -> bool:
    """Whether there are pages of their own for so many."""
    return requests * -(-positions // rank.config.page_size) <= rank.facts.num_pages


def step_of(rank: Rank, case: StepCase) -> Callable[[], DeviceVerified | Verified]:
    if case.way == "tree":
        return tree_step(rank, case)
    verifier = rank.verifier if case.way == "prompt" else with_pass(rank, case)
    return prompt_step(rank, case, verifier)


def seen_of(
    rank: Rank, case: StepCase, call: Callable[[], DeviceVerified | Verified]
) -> Callable[[], DeviceVerified | Verified]:
    """The same rows launched kernel by kernel: what the routers choose in a replay is not told."""
    return step_of(rank, replace(case, way="prompt")) if case.way == "pass" else call


def tree_step(rank: Rank, case: StepCase) -> Callable[[], DeviceVerified]:
    """verify_on_device of the case's trees, as a device round calls it."""
    state = running_state(rank, case.requests, case.context, case.nodes)
    rows = state.rows(torch.arange(case.requests, dtype=torch.int32, device=rank.device))
    trees, position = trees_of(rank, rows, case.nodes)
    return lambda: rank.verifier.verify_on_device(trees, position, rows)


def with_pass(rank: Rank, case: StepCase) -> Verifier:
    """The rank's verifier with a captured pass for the case, of an engine with SLOTS requests."""
    config = replace(rank.config, max_requests=SLOTS, prefill_chunk=case.tokens)
    verifier = with_passes(rank, config)
    assert verifier.passes is not None, "cases() asks first"
    if rank.device.type == "cuda":
        verifier.passes.capture(shared_pool(rank.device))
    return verifier


def prompt_step(rank: Rank, case: StepCase, verifier: Verifier) -> Callable[[], Verified]:
    """Verifier.verify of the last chunk of a prompt."""
    generator = np.random.default_rng(case.tokens)
    known = generator.integers(0, rank.num_tokens, case.tokens).astype(np.int32)
    pages = -(-(case.context + case.tokens) // rank.config.page_size)
    request = PlannedRequest(
        request_id="prompt",
        slot=0,
        num_cached=case.context,
        known=known,
        budget=0,
        pages=np.arange(pages, dtype=np.int32),
        samples=True,
        sampling=GREEDY,
        seed=1,
        num_prompt=case.context + case.tokens,
    )
    plan = StepPlan(step=0, requests=(request,))
    roots = torch.tensor([int(known[-1])], dtype=torch.int32, device=rank.device)
    empty = roots.new_zeros(1, 0, 0)
    trees = rank.ops.build_trees(Candidates(token=empty, score=empty), roots, [0])
    return lambda: verifier.verify(plan, trees)


def refuse_broken(verified: DeviceVerified | Verified) -> None:
    """ValueError where the layers' numbers ran away: such a step would be no step of a model."""
    dead = verified.dead.any() if isinstance(verified, DeviceVerified) else verified.broken
    if dead:
        raise ValueError("rows without any finite logit")


def running_state(rank: Rank, requests: int, context: int, beyond: int) -> RunningState:
    """Requests 0 .. with `context` tokens cached and pages of their own for `beyond` more."""
    size, spare = rank.config.page_size, rank.facts.num_pages
    pages = -(-(context + beyond) // size)
    if not fits(rank, requests, context + beyond):
        raise ValueError(
            f"{requests} requests of {context} tokens need {requests * pages} pages of {size}, "
            f"and there are {spare}; give --kv-tokens more"
        )
    tables = PageTables(
        slots=requests, pages=pages, page_size=size, spare_page=spare, device=rank.device
    )
    state = RunningState(tables)
    roots = np.random.default_rng(requests).integers(0, rank.num_tokens, requests)
    state.place(
        [
            Placement(
                slot=slot, root=int(root), root_position=context, sampling=GREEDY, seed=slot + 1
            )
            for slot, root in enumerate(roots)
        ]
    )
    state.place_pages([(slot, pages_of(slot, pages)) for slot in range(requests)])
    return state


def pages_of(slot: int, count: int) -> Int32Array:
    return np.arange(slot * count, (slot + 1) * count, dtype=np.int32)


def trees_of(rank: Rank, rows: RunningRows, nodes: int) -> tuple[DraftTrees, Tensor]:
    """The best trees of `nodes` nodes for random logits, and the nodes' positions [R, N].

    Their shapes are kept, and every node gets a token of its own: the same token in two places
    would choose much the same experts in a model that never learnt to tell them apart.
    """
    requests = len(rows.root)
    candidates = random_candidates(rank, requests) if nodes > 1 else _none(rows.root)
    budgets = torch.full((requests,), nodes - 1, dtype=torch.int32, device=rank.device)
    placed = rank.round_ops.build_trees(candidates, rows.root, budgets, rows.root_position, nodes)
    least = int(placed.trees.num_nodes.min())
    if least != nodes:
        raise ValueError(f"candidates make trees of {least} nodes where {nodes} are wanted")
    drawn = np.random.default_rng(nodes).integers(0, rank.num_tokens, (requests, nodes))
    token = torch.from_numpy(drawn.astype(np.int32)).to(rank.device)
    return replace(placed.trees, token=token), placed.position


def random_candidates(rank: Rank, requests: int) -> Candidates:
    generator = torch.Generator(rank.device).manual_seed(requests)
    shape = (requests, rank.depth, rank.num_tokens)
    logits = SPREAD * torch.randn(shape, generator=generator, device=rank.device)
    token, score = rank.ops.topk_logprob(logits, min(rank.candidates, rank.num_tokens))
    return Candidates(token=token, score=score)


def _none(roots: Tensor) -> Candidates:
    empty = roots.new_zeros(len(roots), 0, 0)
    return Candidates(token=empty, score=empty)
