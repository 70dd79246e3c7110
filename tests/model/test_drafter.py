"""The DFlash drafter against a plain one, round after round, over scattered pages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kdray.core.plan import AcceptedPaths, StepPlan
from kdray.core.tree import ABSENT, FRACTION_BITS
from kdray.errors import CheckpointError
from kdray.model.drafter import DFlashDrafter
from kdray.model.target import TargetModel
from tests.model.draft_rounds import Rounds, WatchedOps, load, tables_of
from tests.model.plain_dflash import draft_logits
from tests.model.tiny import save_plain
from tests.model.tiny_drafter import draft_config, draft_tensors, write_drafter, write_target

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "short window": {"layer_types": [SLIDING, FULL], "sliding_window": 3},
    "window over the context's end": {"layer_types": [FULL, SLIDING], "sliding_window": 9},
    "window that looks ahead": {
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "yarn": {"rope_scaling": YARN},
    "one key head": {"num_key_value_heads": 1},
    "a key head each": {"num_key_value_heads": 4},
}


def device_state(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Root positions [R] and page tables [R, P] as they lie on a device, with room to spare."""
    position = torch.tensor([r.root_position for r in plan.requests], dtype=torch.int32)
    width = 3 + max(len(request.pages) for request in plan.requests)
    table = torch.zeros(len(plan.requests), width, dtype=torch.int32)
    for row, request in zip(table, plan.requests, strict=True):
        row[: len(request.pages)] = torch.from_numpy(request.pages)
    return position, table


def assert_drafts_like_the_plain_one(
    rounds: Rounds, ops: WatchedOps, config: dict[str, Any], tables: dict[str, torch.Tensor]
) -> None:
    count = len(rounds.known)
    roots = torch.arange(10, 10 + count, dtype=torch.int32)
    plan = rounds.plan([1] * count, [3] * count)
    on_device = rounds.drafter.propose_on_device(roots, *device_state(plan))
    candidates = rounds.drafter.propose(plan, roots)
    assert torch.equal(on_device.token, candidates.token)
    close = (on_device.score - candidates.score).abs().max() < 1e-4 * 2**FRACTION_BITS
    assert ops.logits is not None and close
    logits = ops.logits.view(count, rounds.drafter.depth, -1).double()
    for r in range(count):
        wanted = draft_logits(config, draft_tensors(config), tables, rounds.known[r], int(roots[r]))
        torch.testing.assert_close(logits[r], wanted, atol=1e-4, rtol=1e-4)
        best = wanted.log_softmax(-1).topk(candidates.score.shape[-1])
        found = candidates.score[r].double() / 2**FRACTION_BITS
        torch.testing.assert_close(found, best.values.clamp(min=-31.5), atol=1e-4, rtol=1e-4)
        assert torch.equal(candidates.token[r].long(), best.indices)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_draft_like_the_plain_dflash(tmp_path: Path, kind: str, page_size: int) -> None:
    config = draft_config(**KINDS[kind])
    num_pages = 192 // page_size
    drafter, ops = load(tmp_path, config, page_size=page_size, num_pages=num_pages)
    rounds = Rounds(drafter, num_requests=3, page_size=page_size, num_pages=num_pages, seed=1)
    tables, dice = tables_of(tmp_path), random.Random(page_size)
    rounds.prefill([7, 1, 12])
    assert_drafts_like_the_plain_one(rounds, ops, config, tables)
    rounds.prefill([5, 2, 1])
    for _ in range(3):
        rounds.step([dice.choice([0, 1, 4, 9]) for _ in range(3)])
    assert_drafts_like_the_plain_one(rounds, ops, config, tables)


def test_a_prompt_of_one_token_drafts_without_context(tmp_path: Path) -> None:
    config = draft_config()
    drafter, ops = load(tmp_path, config)
    rounds = Rounds(drafter, num_requests=2, page_size=4, num_pages=64, seed=0)
    assert_drafts_like_the_plain_one(rounds, ops, config, tables_of(tmp_path))


@pytest.mark.parametrize("kind", ["full", "short window"])
def test_unwritten_slots_do_not_leak_into_a_batch(tmp_path: Path, kind: str) -> None:
    config = draft_config(**KINDS[kind])
    drafter, ops = load(tmp_path, config)
    rounds = Rounds(drafter, num_requests=3, page_size=4, num_pages=63, seed=0)
    rounds.prefill([0, 9, 1])
    assert_drafts_like_the_plain_one(rounds, ops, config, tables_of(tmp_path))


def test_the_block_leaves_no_trace(tmp_path: Path) -> None:
    drafter, _ = load(tmp_path, draft_config())
    rounds = Rounds(drafter, num_requests=2, page_size=4, num_pages=64, seed=0)
    rounds.prefill([6, 9])
    before = [cache.clone() for cache in drafter.cache]
    plan, roots = rounds.plan([1, 1], [4, 4]), torch.tensor([3, 4], dtype=torch.int32)
    first, second = drafter.propose(plan, roots), drafter.propose(plan, roots)
    assert torch.equal(first.token, second.token)
    assert torch.equal(first.score, second.score)
    for cache, kept in zip(drafter.cache, before, strict=True):
        torch.testing.assert_close(cache, kept, equal_nan=True, rtol=0, atol=0)


def test_the_root_is_read_as_the_token_it_is(tmp_path: Path) -> None:
    drafter, ops = load(tmp_path, draft_config())
    rounds = Rounds(drafter, num_requests=1, page_size=4, num_pages=64, seed=0)
    rounds.prefill([6])
    seen = []
    for root in (3, 4):
        drafter.propose(rounds.plan([1], [4]), torch.tensor([root], dtype=torch.int32))
        assert ops.logits is not None
        seen.append(ops.logits)
    assert (seen[0] - seen[1]).abs().max() > 0.1


def test_features_of_other_layers_draft_otherwise(tmp_path: Path) -> None:
    config = draft_config()
    drafter, ops = load(tmp_path, config)
    rounds = Rounds(drafter, num_requests=1, page_size=4, num_pages=64, seed=0)
    rounds.prefill([6])
    drafter.propose(rounds.plan([1], [4]), torch.tensor([3], dtype=torch.int32))
    swapped = rounds.known[0].roll(config["hidden_size"], dims=1)
    other = draft_logits(config, draft_tensors(config), tables_of(tmp_path), swapped, 3)
    assert ops.logits is not None
    assert (ops.logits.view(other.shape).double() - other).abs().max() > 0.1


def test_requests_without_budget_cost_nothing_and_get_absent_candidates(tmp_path: Path) -> None:
    drafter, ops = load(tmp_path, draft_config())
    rounds = Rounds(drafter, num_requests=3, page_size=4, num_pages=63, seed=0)
    rounds.prefill([6, 3, 8])
    roots = torch.tensor([3, 4, 5], dtype=torch.int32)
    mixed = drafter.propose(rounds.plan([1, 1, 1], [0, 4, 0]), roots)
    assert ops.logits is not None and ops.logits.shape[:-1].numel() == drafter.depth
    assert (mixed.score[[0, 2]] == ABSENT).all()
    every = drafter.propose(rounds.plan([1, 1, 1], [2, 4, 2]), roots)
    assert torch.equal(mixed.token[1], every.token[1])
    ops.logits = None
    none = drafter.propose(rounds.plan([1, 1, 1], [0, 0, 0]), roots)
    assert ops.logits is None
    assert none.token.shape == (3, drafter.depth, 4) and (none.score == ABSENT).all()


def test_there_are_never_more_candidates_than_tokens(tmp_path: Path) -> None:
    drafter, _ = load(tmp_path, draft_config(), candidates=500)
    rounds = Rounds(drafter, num_requests=1, page_size=4, num_pages=64, seed=0)
    candidates = drafter.propose(rounds.plan([1], [1]), torch.tensor([3], dtype=torch.int32))
    assert candidates.token.shape == (1, 4, 96)
    assert candidates.token[0, 0].sort().values.tolist() == list(range(96))


def test_bfloat16_drafts_close_to_float32(tmp_path: Path) -> None:
    config = draft_config(num_hidden_layers=1)
    drafter, ops = load(tmp_path, config, dtype=torch.bfloat16)
    rounds = Rounds(drafter, num_requests=2, page_size=4, num_pages=64, seed=0)
    rounds.prefill([6, 11])
    drafter.propose(rounds.plan([1, 1], [2, 2]), torch.tensor([3, 4], dtype=torch.int32))
    assert ops.logits is not None and ops.logits.dtype == torch.bfloat16
    wanted = [
        draft_logits(config, draft_tensors(config), tables_of(tmp_path), rounds.known[r], 3 + r)
        for r in range(2)
    ]
    found, exact = ops.logits.view(2, 4, -1).double(), torch.stack(wanted)
    assert (found - exact).abs().mean() < 0.03 * exact.abs().mean()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("target"))


FITTING = draft_config(
    hidden_size=64,
    num_target_layers=3,
    dflash_config={"mask_token_id": 95, "target_layer_ids": [0, 2]},
)
SIZES: dict[str, Any] = {"candidates": 4, "page_size": 4, "num_pages": 8}


def test_tables_are_shared_with_a_whole_target_and_read_for_a_split_one(
    tmp_path: Path, target_folder: Path
) -> None:
    ops = WatchedOps()
    folder = write_drafter(tmp_path, FITTING)
    target = TargetModel.load(target_folder, ops=ops)  # type: ignore[arg-type]
    shared = DFlashDrafter.load(folder, target, ops=ops, **SIZES)  # type: ignore[arg-type]
    read = DFlashDrafter.load(folder, target_folder, ops=ops, **SIZES)  # type: ignore[arg-type]
    assert shared.tables.head is target.head
    assert shared.tables.embedding is target.embedding
    assert torch.equal(read.tables.head, target.head)
    assert torch.equal(read.tables.embedding, target.embedding)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 16), ("vocab_size", 100), ("num_target_layers", 9)]
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, field: str, value: int) -> None:
    write_drafter(tmp_path / "drafter", draft_config(**{field: value}))
    target = write_target(tmp_path / "target", draft_config())
    with pytest.raises(CheckpointError, match=f"{field} {value}, the target's is"):
        DFlashDrafter.load(
            tmp_path / "drafter",
            target,
            ops=WatchedOps(),  # type: ignore[arg-type]
            **SIZES,
        )


@pytest.mark.parametrize("page_size", [1, 4])
def test_accepted_paths_are_learnt_on_the_device_as_on_the_host(
    tmp_path: Path, page_size: int
) -> None:
    drafter, _ = load(tmp_path, draft_config(), page_size=page_size, num_pages=192)
    rounds = Rounds(drafter, num_requests=3, page_size=page_size, num_pages=192, seed=2)
    rounds.prefill([6, 9, 1])
    plan = rounds.plan([1, 1, 1], [5, 0, 4])
    nodes, length = [6, 1, 5], [4, 1, 2]
    node = torch.tensor([[0, 1, 3, 4, 99], [0, 99, 99, 99, 99], [0, 2, 99, 99, 99]]).int()
    paths = AcceptedPaths(node=node, length=torch.tensor(length).int(), bonus=torch.zeros(3).int())
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 6, rounds.known[0].shape[1], generator=generator)
    before = [cache.clone() for cache in drafter.cache]
    flat = torch.cat([features[r, :n] for r, n in enumerate(nodes)])
    drafter.extend(plan, paths, flat, [0, 6, 7, 12])
    wanted = [cache.clone() for cache in drafter.cache]
    for cache, kept in zip(drafter.cache, before, strict=True):
        cache.copy_(kept)
    drafter.extend_on_device(paths, features, *device_state(plan))
    for cache, exact in zip(drafter.cache, wanted, strict=True):
        torch.testing.assert_close(cache, exact, equal_nan=True, atol=1e-5, rtol=1e-5)
