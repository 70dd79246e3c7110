from __future__ import annotations

from pathlib import Path

import torch

from kdray.config import EngineConfig
from kdray.facts import resolve
from kdray.kernel_sizes import kernel_sizes
from kdray.kernels.reference import ReferenceOps
from kdray.kernels.reference_round import ReferenceRoundOps
from kdray.kernels.selftest import compare, compare_rounds
from kdray.kernels.selftest_inputs import DraftSizes, Sizes
from kdray.model.parallel import Shard

KIMI = Path(__file__).resolve().parents[1] / "jobs" / "kimi_k26"
CPU = torch.device("cpu")


def sizes_of_kimi(draft_tp: int | None = None) -> list[Sizes]:
    """Two ranks' of eight."""
    config = EngineConfig(
        model=str(KIMI),
        drafter=str(KIMI / "drafter"),
        tp=8,
        draft_tp=draft_tp,
        device="cpu",
        dtype="bfloat16",
    )
    return [kernel_sizes(config, resolve(config), Shard(rank, 8)) for rank in (0, 1)]


def test_a_rank_of_kimi_k26() -> None:
    first, other = sizes_of_kimi()
    assert (first.width, first.heads, first.latent, first.rope) == (7168, 8, 512, 64)
    assert first.query_latent == 1536
    assert (first.nope, first.value, first.experts, first.inner) == (128, 128, 384, 256)
    assert first.rule is not None and first.rule.top_k == 8
    assert first.draft == DraftSizes(heads=8, groups=1, dim=128, slots=8)
    assert other == first


def test_ranks_of_which_one_drafts_alone() -> None:
    first, other = sizes_of_kimi(draft_tp=1)
    assert first.draft == DraftSizes(heads=64, groups=8, dim=128, slots=8)
    assert other.draft is None


def test_the_demos_sizes_are_those_of_all_cases() -> None:
    config = EngineConfig(device="cpu")
    sizes = kernel_sizes(config, resolve(config), Shard())
    compare(ReferenceOps(CPU), ReferenceOps(CPU), sizes, CPU)
    compare_rounds(ReferenceRoundOps(CPU), ReferenceRoundOps(CPU), sizes, CPU)
