"""topk_logprob on a GPU: tokens equal the reference, scores the float64 ones within two units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdray.errors import KernelError
from kdray.kernels.cuda_topk import DTYPES, MAX_VOCAB, CudaTopk
from kdray.kernels.loader import KernelLoader
from tests.kernels.topk_cases import KINDS, assert_exact, logits_of

pytestmark = pytest.mark.gpu

VOCAB = 163840


@pytest.fixture(scope="module")
def topk(loader: KernelLoader) -> CudaTopk:
    return CudaTopk(loader)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, 64])
def test_every_kind_of_row(topk: CudaTopk, kind: str, dtype: torch.dtype, k: int) -> None:
    logits = logits_of(kind, 5, VOCAB, dtype, "cuda")
    found = topk.topk_logprob(logits, k)
    assert_exact(logits, k, *found)
    for run in (1, 3, 7, 17, 20, 23, 100):  # of 20 segments a row, 100 in all
        assert same(topk.topk_logprob(logits, k, run=run), found), f"{run} segments a block"


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 1024, 8191, 8193, 129280, 151936, MAX_VOCAB])
@pytest.mark.parametrize("k", [1, 8, 33])
def test_awkward_vocabularies(topk: CudaTopk, vocab: int, k: int) -> None:
    for dtype in DTYPES:
        for kind in ("normal", "holes", "band"):
            logits = logits_of(kind, 3, vocab, dtype, "cuda", seed=vocab)
            assert_exact(logits, k, *topk.topk_logprob(logits, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_stride_and_alignment(topk: CudaTopk, dtype: torch.dtype) -> None:
    wide = logits_of("normal", 9, 32100, dtype, "cuda")
    for logits in (wide[:, 1:32001], wide[::2, 3:], wide[1:, :32000], wide.t()[:9000].t()):
        assert_exact(logits, 16, *topk.topk_logprob(logits, 16))


def test_a_row_does_not_depend_on_its_batch(topk: CudaTopk) -> None:
    logits = logits_of("normal", 1100, 32768, torch.bfloat16, "cuda")
    together = topk.topk_logprob(logits, 16)
    assert_exact(logits, 16, *together)
    for rows in (1, 7, 56, 200, 513, 1024):
        part = topk.topk_logprob(logits[:rows], 16)
        assert same(part, (together[0][:rows], together[1][:rows])), f"{rows} rows"


def test_the_result_is_the_same_every_time(topk: CudaTopk) -> None:
    """Timing decides which survivors a list meets first; it must not show."""
    for kind in ("normal", "band", "steps"):
        logits = logits_of(kind, 56, VOCAB, torch.bfloat16, "cuda")
        first = topk.topk_logprob(logits, 16)
        assert all(same(topk.topk_logprob(logits, 16), first) for _ in range(50))


@pytest.mark.parametrize("seed", range(10))
def test_random_rows(topk: CudaTopk, seed: int) -> None:
    for kind in ("normal", "peaky", "band", "holes"):
        logits = logits_of(kind, 64, VOCAB, torch.bfloat16, "cuda", seed=1000 + seed)
        assert_exact(logits, 16, *topk.topk_logprob(logits, 16))


@pytest.mark.parametrize("kind", ["normal", "band", "holes", "dead", "huge", "infinite"])
@pytest.mark.parametrize("shards", [2, 8, 16])
def test_merged_shards_give_the_unsharded_result(topk: CudaTopk, kind: str, shards: int) -> None:
    logits = logits_of(kind, 20, VOCAB, torch.bfloat16, "cuda")
    size = VOCAB // shards
    parts = [
        topk.topk_partial(logits[:, first : first + size], 16, first)
        for first in range(0, VOCAB, size)
    ]
    stacked = [
        torch.stack([getattr(part, name) for part in parts]) for name in ("value", "id", "mass")
    ]
    assert same(topk.merge_topk(*stacked), topk.topk_logprob(logits, 16))


def test_unaligned_shards_give_the_same_tokens(topk: CudaTopk) -> None:
    logits = logits_of("normal", 6, 129280, torch.float32, "cuda")
    parts = [
        topk.topk_partial(logits[:, first : first + 16160], 24, first)
        for first in range(0, 129280, 16160)
    ]
    stacked = [
        torch.stack([getattr(part, name) for part in parts]) for name in ("value", "id", "mass")
    ]
    assert_exact(logits, 24, *topk.merge_topk(*stacked))


def test_a_graph_replays_on_new_logits(topk: CudaTopk) -> None:
    for rows in (7, 448):
        logits = logits_of("normal", rows, VOCAB, torch.bfloat16, "cuda")
        topk.topk_logprob(logits, 16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = topk.topk_logprob(logits, 16)
        for seed, kind in enumerate(("normal", "band", "rising", "peaky")):
            logits.copy_(logits_of(kind, rows, VOCAB, torch.bfloat16, "cuda", seed=seed))
            for output in captured:
                output.fill_(-7)
            graph.replay()
            assert_exact(logits, 16, *captured)


def test_the_launch_follows_torchs_stream(topk: CudaTopk) -> None:
    side = torch.cuda.Stream()
    logits = logits_of("normal", 8, VOCAB, torch.bfloat16, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # the copy is late; a launch elsewhere would not wait for it
        logits.copy_(logits_of("peaky", 8, VOCAB, torch.bfloat16, "cuda"))
        found = topk.topk_logprob(logits, 16)
    side.synchronize()
    assert_exact(logits, 16, *found)


def test_nothing_beyond_the_outputs_is_written(topk: CudaTopk) -> None:
    logits = logits_of("normal", 3, 5000, torch.bfloat16, "cuda")
    fence = torch.full((5, 9), -7, dtype=torch.int32, device="cuda")
    token, score = fence[1:4], fence.clone()[1:4]
    topk._launch("topk_logprob", (token, score), logits, 9, None, ())
    assert_exact(logits, 9, token, score)
    assert (fence[0] == -7).all() and (fence[4] == -7).all()


def test_what_the_kernel_does_not_take_is_refused(topk: CudaTopk) -> None:
    logits = torch.zeros(2, 100, device="cuda")
    with pytest.raises(KernelError, match="k up to 64"):
        topk.topk_logprob(logits, 65)
    with pytest.raises(KernelError, match="cast them"):
        topk.topk_logprob(logits.half(), 4)
    with pytest.raises(KernelError, match="shards"):
        value = torch.zeros(40, 2, 64, device="cuda")
        topk.merge_topk(value, value.int(), torch.zeros(40, 2, 3, device="cuda").long())


def test_shapes_without_rows_or_candidates(topk: CudaTopk) -> None:
    for shape, k in [((0, 7, 50), 3), ((2, 7, 50), 0)]:
        token, score = topk.topk_logprob(torch.zeros(shape, device="cuda"), k)
        assert token.shape == score.shape == (*shape[:-1], k)
