"""topk_logprob.cu's own source, thread by thread on the CPU, against the reference and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.kernels.cuda_topk import SEGMENT, CudaTopk
from tests.kernels.simt_loader import simt_loader
from tests.kernels.topk_cases import KINDS, assert_exact, logits_of


@pytest.fixture(scope="module")
def topk() -> CudaTopk:
    return CudaTopk(simt_loader())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 1), (torch.float32, 2)], ids=str)
def test_every_kind_of_row(kind: str, dtype: torch.dtype, seed: int) -> None:
    topk = CudaTopk(simt_loader(seed))
    logits = logits_of(kind, 2, 3 * SEGMENT + 77, dtype)
    whole = topk.topk_logprob(logits, 16, splits=1)
    assert_exact(logits, 16, *whole)
    split = topk.topk_logprob(logits, 16, splits=4)
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


@pytest.mark.parametrize("k", [1, 5, 8, 32, 33, 64])
def test_every_k(topk: CudaTopk, k: int) -> None:
    for kind in ("normal", "band", "rising"):
        logits = logits_of(kind, 2, 2 * SEGMENT - 1, torch.bfloat16)
        assert_exact(logits, k, *topk.topk_logprob(logits, k))


@pytest.mark.parametrize("vocab", [1, 3, 31, 1023, 1024, 1025, SEGMENT, SEGMENT + 1])
def test_awkward_vocabularies(topk: CudaTopk, vocab: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of("holes", 3, vocab, dtype)
        assert_exact(logits, 7, *topk.topk_logprob(logits, 7))


def test_any_stride_and_alignment(topk: CudaTopk) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = logits_of("normal", 4, SEGMENT + 9, dtype)[1:, 3:]
        assert_exact(logits, 9, *topk.topk_logprob(logits, 9))


def shards_of(logits: Tensor, edges: list[int], topk: CudaTopk, k: int) -> list[Tensor]:
    parts = [
        topk.topk_partial(logits[:, low:high], k, low)
        for low, high in zip(edges, [*edges[1:], logits.shape[1]], strict=True)
    ]
    return [
        torch.stack([getattr(part, name) for part in parts]) for name in ("value", "id", "mass")
    ]


@pytest.mark.parametrize("kind", ["normal", "band", "holes", "dead", "huge"])
def test_merged_shards_give_the_unsharded_result(topk: CudaTopk, kind: str) -> None:
    logits = logits_of(kind, 3, SEGMENT + 1500, torch.bfloat16)
    token, score = topk.merge_topk(*shards_of(logits, [0, 1024, 5120, SEGMENT], topk, 12))
    whole = topk.topk_logprob(logits, 12)
    assert torch.equal(token, whole[0]) and torch.equal(score, whole[1])


def test_small_shards_are_padded(topk: CudaTopk) -> None:
    logits = logits_of("holes", 3, 20, torch.float32)
    token, score = topk.merge_topk(*shards_of(logits, [0, 2, 9, 10], topk, 24))
    assert_exact(logits, 24, token, score)
