"""A drafter that ranks share, each with its heads, MLP columns, features and vocabulary: what it
drafts is what one rank drafts alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from kdray.core.plan import Candidates
from kdray.core.tree import ABSENT, FRACTION_BITS, MIN_LOGPROB
from kdray.errors import ConfigError
from kdray.kernels.ops import load_ops
from kdray.model.drafter import DFlashDrafter
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
from kdray.model.target_tables import merge_best, weight_of
from tests.model.draft_rounds import Rounds
from tests.model.test_drafter import FITTING, device_state
from tests.model.tiny import save_plain
from tests.model.tiny_drafter import write_drafter
from tests.thread_ranks import Meeting, ThreadCollectives

T = TypeVar("T")

OPS = load_ops("cpu")
UNIT = 2.0**-FRACTION_BITS


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("target"))


def on_ranks(size: int, be_rank: Callable[[ThreadCollectives], T]) -> list[T]:
    meeting = Meeting(size)

    def run(rank: int) -> T:
        try:
            return be_rank(ThreadCollectives(meeting, rank))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def drafter_of(folder: Path, target: Path, ranks: ThreadCollectives | None, **wishes: Any) -> Any:
    shard = Shard(ranks.rank, ranks.meeting.size) if ranks else Shard()
    model = TargetModel.load(target, ops=OPS, shard=shard, collectives=ranks)
    sizes = {"candidates": 6, "page_size": 4, "num_pages": 64, **wishes}
    drafter = DFlashDrafter.load(folder, model, ops=OPS, **sizes)
    for cache in drafter.cache:
        cache.fill_(float("nan"))  # wherever nothing gets written
    return drafter


def drafts(drafter: DFlashDrafter, *, leads: bool = True) -> list[Candidates]:
    """What it drafts after some rounds, from the host's plans and from the device's state."""
    rounds = Rounds(drafter, num_requests=3, page_size=4, num_pages=64, seed=3)
    rounds.prefill([7, 1, 12])
    found = []
    for budgets in ([4, 0, 9], [1, 3, 2]):
        rounds.step(budgets)
        roots = torch.tensor([5, 40, 95], dtype=torch.int32)
        plan = rounds.plan([1, 1, 1], [3, 3, 3])
        found.append(drafter.propose(plan, roots))
        position, table = device_state(plan)
        if not leads:  # only rank 0 knows them
            roots, position = torch.zeros_like(roots), torch.zeros_like(position)
        found.append(drafter.propose_on_device(roots, position, table))
    return found


def assert_alike(found: Candidates, wanted: Candidates) -> None:
    assert torch.equal(found.token, wanted.token)
    assert (found.score - wanted.score).abs().max() * UNIT < 2e-5


@pytest.mark.parametrize(("size", "key_heads"), [(2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_ranks_draft_what_one_drafts(
    tmp_path: Path, target_folder: Path, size: int, key_heads: int, weights: str
) -> None:
    config = FITTING | {"num_key_value_heads": key_heads, "intermediate_size": 32 * size}
    folder = write_drafter(tmp_path, config)
    wanted = drafts(drafter_of(folder, target_folder, None, weights=weights))

    def be_rank(ranks: ThreadCollectives) -> list[Candidates]:
        drafter = drafter_of(folder, target_folder, ranks, weights=weights)
        assert drafter.cache[0].shape[2] == key_heads // size
        return drafts(drafter, leads=ranks.rank == 0)

    for found in on_ranks(size, be_rank):
        for mine, one in zip(found, wanted, strict=True):
            assert_alike(mine, one)


def test_a_rank_holds_its_part_of_every_matrix(tmp_path: Path, target_folder: Path) -> None:
    folder = write_drafter(tmp_path, FITTING)

    def numbers(drafter: DFlashDrafter) -> dict[str, int]:
        weights = drafter.network.weights
        layer = weights.layers[0]
        return {
            "fc": weights.fc.numel(),
            "qkv": layer.qkv.numel(),
            "out": layer.out.numel(),
            "gate_up": layer.mlp.gate_up.numel(),  # type: ignore[attr-defined]
            "down": layer.mlp.down.numel(),  # type: ignore[attr-defined]
            "cache": drafter.cache[0].numel(),
        }

    whole = numbers(drafter_of(folder, target_folder, None))
    for found in on_ranks(2, lambda ranks: numbers(drafter_of(folder, target_folder, ranks))):
        assert found == {name: count // 2 for name, count in whole.items()}


@pytest.mark.parametrize("field", ["num_key_value_heads", "intermediate_size"])
def test_what_does_not_split_is_refused(tmp_path: Path, target_folder: Path, field: str) -> None:
    folder = write_drafter(tmp_path, FITTING | {field: 1})
    half = TargetModel.load(target_folder, ops=OPS, shard=Shard(0, 2))
    with pytest.raises(ConfigError, match="2 ranks cannot share the drafter evenly"):
        DFlashDrafter.load(folder, half, ops=OPS, candidates=4, page_size=4, num_pages=8)


def parts_of(logits: torch.Tensor, parts: int, k: int) -> tuple[torch.Tensor, ...]:
    """What each part finds by itself, as merge_best takes it."""
    pieces = logits.chunk(parts, dim=1)
    best = [OPS.topk_logprob(piece, k) for piece in pieces]
    token = [token + i * pieces[0].shape[1] for i, (token, _) in enumerate(best)]
    weight = [weight_of(piece, *found)[:, 0] for piece, found in zip(pieces, best, strict=True)]
    return (
        torch.stack(token, 1),
        torch.stack([score for _, score in best], 1),
        torch.stack(weight, 1),
    )


@pytest.mark.parametrize(("parts", "k"), [(1, 4), (2, 8), (8, 5)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_the_best_of_the_parts_are_the_best_of_all(parts: int, k: int, spread: float) -> None:
    """But for what is nearer than the fixed point tells apart, or as good as impossible."""
    generator = torch.Generator().manual_seed(parts)
    logits = spread * torch.randn(7, 96, generator=generator)
    token, score = merge_best(*parts_of(logits, parts, k))
    wanted = OPS.topk_logprob(logits, k)
    logprob = logits.log_softmax(1).clamp_min(MIN_LOGPROB)
    found, best = (logprob.gather(1, t.long()) for t in (token, wanted[0]))
    torch.testing.assert_close(found, best, atol=8 * UNIT, rtol=1e-6)
    assert (score - wanted[1]).abs().max() <= 8 + spread  # rounded twice, of float32 sums
    assert all(len(set(row)) == k for row in token.tolist())


def test_ties_go_to_the_smaller_token_and_absent_ones_come_last() -> None:
    logits = torch.full((2, 16), -torch.inf)
    logits[0, [3, 6, 9, 14]] = 1.0
    logits[1, 13] = -2.0
    token, score = merge_best(*parts_of(logits, 4, 3))
    assert token[0].tolist() == [3, 6, 9]
    assert (score[0] == score[0, 0]).all()
    assert token[1, 0] == 13 and score[1, 0] == 0
    assert (score[1, 1:] == ABSENT).all()


def test_a_part_weighs_what_its_logits_sum_up_to() -> None:
    for spread in (0.01, 1.0, 30.0):
        logits = spread * torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
        weight = weight_of(logits, *OPS.topk_logprob(logits, 2))
        torch.testing.assert_close(weight[:, 0], logits.logsumexp(1), atol=UNIT, rtol=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_logits_without_a_number_spoil_no_others(parts: int) -> None:
    """NaN as -inf and +inf as the largest number, in any part, as one rank takes them."""
    logits = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    logits[0] = torch.nan
    logits[1, 5] = torch.nan
    logits[2, 70] = torch.inf
    logits[3, :48] = -torch.inf
    logits[4] = -torch.inf
    logits[5, :50] = torch.nan
    logits[6] = torch.inf
    token, score = merge_best(*parts_of(logits, parts, 4))
    wanted, best = OPS.topk_logprob(logits, 4)
    assert torch.equal(score == ABSENT, best == ABSENT)
    assert ((score - best).abs()[best != ABSENT] <= 8).all()
    first = 1 if parts > 1 else 4  # beside +inf all else is as good as impossible
    assert torch.equal(token[[1, 3, 5]], wanted[[1, 3, 5]])
    assert torch.equal(token[[2, 6], :first], wanted[[2, 6], :first])
