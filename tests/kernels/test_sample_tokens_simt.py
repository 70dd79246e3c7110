"""sample_tokens.cu's own source, thread by thread on the CPU, against core.sampling."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kdray.core.request import SamplingParams
from kdray.core.sampling import clean_logits, drop_unlikely, gumbel_noise, temper
from kdray.kernels.cuda_sampling import CudaSampling, Winners, draw_rows
from kdray.kernels.loader import KernelLoader
from tests.kernels.sampling_cases import ADJUSTED, PLAIN, WAYS, expected, logits_of, rows_of
from tests.kernels.simt_loader import simt_loader

NOISE_SLACK = 2.0**-10


@pytest.fixture(scope="module")
def loader() -> KernelLoader:
    return simt_loader(1)


@pytest.fixture(scope="module")
def sampling(loader: KernelLoader) -> CudaSampling:
    return CudaSampling(loader)


@pytest.mark.parametrize("kind", ["normal", "sure", "ties", "holes"])
@pytest.mark.parametrize("vocab", [5, 64, 2500])
def test_every_way_of_drawing(sampling: CudaSampling, kind: str, vocab: int) -> None:
    logits, rows = logits_of(kind, len(WAYS), vocab), rows_of(WAYS, vocab)
    before = logits.clone()
    drawn = sampling.sample_tokens(logits, rows)
    assert drawn.token.dtype == torch.int32
    assert drawn.token.tolist() == expected(logits, rows)
    assert not drawn.dead.any()
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def test_bfloat16_logits(sampling: CudaSampling) -> None:
    logits, rows = logits_of("normal", len(WAYS), 1501).bfloat16(), rows_of(WAYS, 1501)
    assert sampling.sample_tokens(logits, rows).token.tolist() == expected(logits, rows)


def test_any_stride_and_alignment(sampling: CudaSampling) -> None:
    logits = logits_of("normal", 2 * len(WAYS), 2055)[::2, 3:]
    rows = rows_of(WAYS, 2052)
    assert sampling.sample_tokens(logits, rows).token.tolist() == expected(logits, rows)


def test_dead_rows_are_flagged(sampling: CudaSampling) -> None:
    logits = logits_of("normal", 4, 50)
    logits[1], logits[3] = -torch.inf, torch.nan
    rows = rows_of([PLAIN[0], PLAIN[0], PLAIN[1], PLAIN[1]], 50)
    drawn = sampling.sample_tokens(logits, rows)
    assert drawn.dead.tolist() == [0, 1, 0, 1] and drawn.token.tolist()[1::2] == [0, 0]


def test_winners_of_shards_merge_to_the_row(sampling: CudaSampling) -> None:
    vocab, ways = 1000, PLAIN + ADJUSTED[3:4]
    logits, rows = logits_of("normal", len(ways), vocab), rows_of(ways, vocab)
    edges, parameters = [0, 256, 260, 700, vocab], draw_rows(rows, torch.device("cpu"))
    shards = [logits[:, low:high].clone() for low, high in pairwise(edges)]
    bias = [shard[-1].add_(0) for shard in shards]  # the last row's bias, shard by shard
    for token, value in ways[-1].logit_bias:
        for low, high, row in zip(edges[:-1], edges[1:], bias, strict=True):
            if low <= token < high:
                row[token - low] += value
    maxima = [sampling.row_maxima(shard) for shard in shards]
    whole = torch.cat([part.value for part in maxima], dim=1).amax(dim=1, keepdim=True)
    winners = [
        sampling.draw_winners(shard, parameters, part, whole, first_id=low)
        for shard, part, low in zip(shards, maxima, edges[:-1], strict=True)
    ]
    side_by_side = Winners(
        value=torch.cat([part.value for part in winners], dim=1),
        id=torch.cat([part.id for part in winners], dim=1),
    )
    assert sampling.merge_winners(side_by_side).token.tolist() == expected(logits, rows)


def test_noise_of_random_words(loader: KernelLoader) -> None:
    """The exact form is core's; the estimate is near enough to sort out by."""
    kernel = loader.get("sample_tokens", "noise_of_words", {"INPUT_BF16": 0})
    for first in (0, 2**31 - 500, 2**32 - 2**24 - 500, 2**32 - 1000, 1580030168):
        exact, estimate = torch.empty(1000), torch.empty(1000)
        kernel.launch(4, 256, (exact, estimate, np.uint32(first), 1000))
        word = np.arange(first, first + 1000, dtype=np.uint64)
        wanted = (-np.log(-np.log((word + 0.5) * 2.0**-32))).astype(np.float32)
        assert np.array_equal(exact.numpy(), wanted)
        assert (estimate - exact).abs().max().item() < NOISE_SLACK / 4


def test_noise_is_addressed_as_cores(sampling: CudaSampling) -> None:
    """Equal logits: the token with the most noise wins."""
    seeds, positions = [0, 1, 2**63 - 1, 2**40], [0, 2**31 - 1, 7, 1]
    rows = rows_of([SamplingParams(temperature=1.0)] * 4, 2050)
    addressed = type(rows)(
        params=rows.params,
        seed=seeds,
        position=positions,
        history=rows.history,
        end_token_ids=rows.end_token_ids,
    )
    drawn = sampling.sample_tokens(torch.zeros(4, 2050), addressed)
    noise = gumbel_noise(seeds, positions, 2050)
    assert drawn.token.tolist() == noise.argmax(axis=1).tolist()


@pytest.mark.parametrize("kind", ["normal", "sure", "ties", "holes"])
def test_cuts_keep_what_core_keeps(sampling: CudaSampling, kind: str) -> None:
    """The kept tokens themselves, not only the winner among them."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    ways = [
        SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 4.0])),
            top_k=int(rng.choice([0, 1, 7, 300, 2299, 2300, 5000])),
            top_p=float(rng.choice([1.0, 0.05, 0.5, 0.95, 0.9999999])),
            min_p=float(rng.choice([0.0, 0.001, 0.3, 1.0])),
        )
        for _ in range(10)
    ]
    logits, rows = logits_of(kind, len(ways), 2300), rows_of(ways, 2300)
    maxima = sampling.row_maxima(logits)
    cut = sampling.find_cuts(logits, maxima.value, draw_rows(rows, logits.device))
    for row, way in enumerate(ways):
        tempered = temper(clean_logits(logits[row].numpy()), way.temperature)
        place = np.abs(tempered).view(np.uint32).astype(np.uint64) << np.uint64(18)
        kept = (place | np.arange(2300, dtype=np.uint64)) < np.uint64(cut[row].item())
        alive = tempered > -np.inf
        assert np.array_equal(kept & alive, drop_unlikely(tempered, way) > -np.inf), way
