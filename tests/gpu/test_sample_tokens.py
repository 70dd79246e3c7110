"""sample_tokens on a GPU: the tokens that core.sampling draws, and the noise of every word."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.request import SamplingParams
from kdray.errors import KernelError
from kdray.kernels.cuda_sampling import CudaSampling, DrawRows, Winners, draw_rows
from kdray.kernels.loader import KernelLoader
from tests.kernels.sampling_cases import (
    ADJUSTED,
    FILTERED,
    PLAIN,
    WAYS,
    expected,
    logits_of,
    rows_of,
)

pytestmark = pytest.mark.gpu

VOCAB = 163840
KINDS = ("normal", "sure", "ties", "holes")
NOISE_SLACK = 2.0**-10  # as in sample_tokens.cu
WORDS_AT_ONCE = 1 << 24


@pytest.fixture(scope="module")
def sampling(loader: KernelLoader) -> CudaSampling:
    return CudaSampling(loader)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [3, 1000, 32003, VOCAB])
def test_every_way_of_drawing(sampling: CudaSampling, kind: str, vocab: int) -> None:
    logits, rows = logits_of(kind, len(WAYS), vocab), rows_of(WAYS, vocab)
    on_gpu = logits.cuda()
    drawn = sampling.sample_tokens(on_gpu, rows)
    assert drawn.token.tolist() == expected(logits, rows)
    assert not drawn.dead.any()
    assert torch.equal(on_gpu.cpu().nan_to_num(7.0), logits.nan_to_num(7.0))  # left as they were


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_logits(sampling: CudaSampling, kind: str) -> None:
    logits, rows = logits_of(kind, len(WAYS), VOCAB).bfloat16(), rows_of(WAYS, VOCAB)
    assert sampling.sample_tokens(logits.cuda(), rows).token.tolist() == expected(logits, rows)


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 8.0])
def test_filters_on_flat_and_on_sure_rows(sampling: CudaSampling, spread: float) -> None:
    """A nucleus of 100,000 tokens, mass ties, and one of two tokens."""
    ways = [way for way in FILTERED for _ in range(3)]
    logits, rows = logits_of("normal", len(ways), 50_000) * spread, rows_of(ways, 50_000)
    assert sampling.sample_tokens(logits.cuda(), rows).token.tolist() == expected(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.8, 1.0, 3.0])
def test_many_rows(sampling: CudaSampling, temperature: float) -> None:
    ways = [SamplingParams(temperature=temperature)] * 600
    logits, rows = logits_of("normal", 600, 8000), rows_of(ways, 8000, seed=5)
    assert sampling.sample_tokens(logits.cuda(), rows).token.tolist() == expected(logits, rows)


def test_a_row_does_not_depend_on_its_batch(sampling: CudaSampling) -> None:
    ways = WAYS * 8
    logits, rows = logits_of("normal", len(ways), 32000).cuda(), rows_of(ways, 32000)
    together = sampling.sample_tokens(logits, rows).token.tolist()
    columns = ("params", "seed", "position", "history", "end_token_ids")
    for row in range(0, len(ways), 7):
        own = {name: [getattr(rows, name)[row]] for name in columns}
        alone = sampling.sample_tokens(logits[row : row + 1], replace(rows, **own))
        assert alone.token.tolist() == [together[row]]


def test_the_result_is_the_same_every_time(sampling: CudaSampling) -> None:
    logits, rows = logits_of("ties", len(WAYS), VOCAB).cuda(), rows_of(WAYS, VOCAB)
    first = sampling.sample_tokens(logits, rows).token
    assert all(torch.equal(sampling.sample_tokens(logits, rows).token, first) for _ in range(30))


def test_any_stride_and_alignment(sampling: CudaSampling) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wide = logits_of("normal", 2 * len(WAYS), 9001).to(dtype).cuda()
        for logits in (wide[::2, 1:], wide[: len(WAYS), 2:9000], wide[1::2, :8999]):
            rows = rows_of(WAYS, logits.shape[1])
            assert sampling.sample_tokens(logits, rows).token.tolist() == expected(logits, rows)


def test_dead_rows_are_flagged(sampling: CudaSampling) -> None:
    logits = logits_of("normal", 6, VOCAB)
    logits[1], logits[4] = -torch.inf, torch.nan
    ways = [PLAIN[0], PLAIN[0], PLAIN[1], FILTERED[0], FILTERED[3], PLAIN[1]]
    drawn = sampling.sample_tokens(logits.cuda(), rows_of(ways, VOCAB))
    assert drawn.dead.tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("shards", [2, 8])
def test_winners_of_shards_merge_to_the_row(sampling: CudaSampling, shards: int) -> None:
    ways = PLAIN * 3
    logits, rows = logits_of("normal", len(ways), VOCAB), rows_of(ways, VOCAB)
    parameters = draw_rows(rows, torch.device("cuda"))
    edges = list(range(0, VOCAB + 1, VOCAB // shards))
    parts = [logits[:, low:high].cuda() for low, high in pairwise(edges)]
    maxima = [sampling.row_maxima(part) for part in parts]
    whole = torch.cat([part.value for part in maxima], dim=1).amax(dim=1, keepdim=True)
    winners = [
        sampling.draw_winners(part, parameters, maximum, whole, first_id=low)
        for part, maximum, low in zip(parts, maxima, edges[:-1], strict=True)
    ]
    side_by_side = Winners(
        value=torch.cat([part.value for part in winners], dim=1),
        id=torch.cat([part.id for part in winners], dim=1),
    )
    assert sampling.merge_winners(side_by_side).token.tolist() == expected(logits, rows)


def test_a_graph_replays_on_new_logits_and_addresses(sampling: CudaSampling) -> None:
    ways = PLAIN + FILTERED
    logits = logits_of("normal", len(ways), VOCAB).cuda()
    rows = draw_rows(rows_of(ways, VOCAB), torch.device("cuda"))
    sampling.draw(logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sampling.draw(logits, rows)
    for seed, kind in enumerate(KINDS):
        fresh, new = logits_of(kind, len(ways), VOCAB, seed), rows_of(ways, VOCAB, seed)
        logits.copy_(fresh)
        overwrite(rows, draw_rows(new, torch.device("cuda")))
        drawn.token.fill_(-7)
        graph.replay()
        assert drawn.token.tolist() == expected(fresh, new)


def overwrite(rows: DrawRows, new: DrawRows) -> None:
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
        getattr(rows, name).copy_(getattr(new, name))


def test_adjustments_are_the_references(sampling: CudaSampling) -> None:
    """Long histories: thousands of changed logits a row."""
    rows = rows_of(ADJUSTED * 4, 32000)
    rng = np.random.default_rng(3)
    history = [
        None if old is None else (rng.integers(0, 32000, 5000).tolist(), old[1] * 40)
        for old in rows.history
    ]
    logits = logits_of("normal", len(history), 32000)
    changed = replace(rows, history=history)
    drawn = sampling.sample_tokens(logits.cuda(), changed)
    assert drawn.token.tolist() == expected(logits, changed)


def noise(loader: KernelLoader, first: int, count: int) -> tuple[Tensor, Tensor]:
    exact, estimate = torch.empty(count, device="cuda"), torch.empty(count, device="cuda")
    kernel = loader.get("sample_tokens", "noise_of_words", {"INPUT_BF16": 0})
    kernel.launch(-(-count // 256), 256, (exact, estimate, np.uint32(first), count))
    return exact, estimate


def test_the_estimate_of_every_word_is_near_its_noise(loader: KernelLoader) -> None:
    """What sorts tokens out without a float64 logarithm: all 2^32 words, four times as near as the
    slack asks (t's own error takes a share)."""
    worst = 0.0
    for first in range(0, 2**32, WORDS_AT_ONCE):
        exact, estimate = noise(loader, first, WORDS_AT_ONCE)
        worst = max(worst, (exact - estimate).abs().max().item())
        assert exact.max().item() < 22.89
    assert worst < NOISE_SLACK / 4, worst


def test_the_noise_of_every_word_is_cores(
    loader: KernelLoader, record_property: Callable[[str, object], None]
) -> None:
    """All 2^32 words. float64 logarithms differ in their last bit from library to library, so a few
    words round to a neighbouring float32; near 0, where noise cancels, by that bit itself."""

    def differing(first: int) -> NDArray[np.uint64]:
        exact = noise(loader, first, WORDS_AT_ONCE)[0].cpu().numpy()
        word = np.arange(first, first + WORDS_AT_ONCE, dtype=np.uint64)
        wanted = (-np.log(-np.log((word + 0.5) * 2.0**-32))).astype(np.float32)
        near = np.abs(exact - wanted) <= np.spacing(np.abs(wanted)) + 2.0**-50
        assert near.all(), word[~near][:5]
        return word[exact != wanted]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = np.concatenate(list(pool.map(differing, range(0, 2**32, WORDS_AT_ONCE))))
    record_property("differing_words", len(found))
    print(f"noise: {len(found)} of 2^32 words differ from NumPy's by the last bit")
    assert len(found) < 4096, f"{len(found)} words differ: {found[:10]}"


def test_what_the_kernels_do_not_take_is_refused(sampling: CudaSampling) -> None:
    rows = rows_of([PLAIN[1]] * 2, 64)
    logits = torch.zeros(2, 64, device="cuda")
    with pytest.raises(KernelError, match="cast them"):
        sampling.sample_tokens(logits.half(), rows)
    with pytest.raises(KernelError, match="contiguous"):
        sampling.sample_tokens(torch.zeros(64, 2, device="cuda").t(), rows)
    with pytest.raises(KernelError, match="multiple of 4"):
        maxima = sampling.row_maxima(logits)
        parameters = draw_rows(rows, logits.device)
        sampling.draw_winners(logits, parameters, maxima, maxima.value, first_id=2)


def test_no_rows(sampling: CudaSampling) -> None:
    drawn = sampling.sample_tokens(torch.zeros(0, 9, device="cuda"), rows_of([], 9))
    assert drawn.token.shape == drawn.dead.shape == (0,)
