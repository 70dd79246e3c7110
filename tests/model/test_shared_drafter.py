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
from kdray.core.tree import FRACTION_BITS
from kdray.errors import ConfigError
from kdray.kernels.ops import load_ops
from kdray.model.drafter import DFlashDrafter
from kdray.model.parallel import Shard
from kdray.model.target import TargetModel
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
