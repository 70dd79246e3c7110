"""Addressed sampling: published random bits, the right law, and filters against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdray.core.request import SamplingParams
from kdray.core.sampling import adjust_logits, draw, filter_logits, gumbel_noise, philox

F = 0xFFFFFFFF
PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert tuple(philox(counter, key).tolist()) == words
    batch = philox([np.full((3, 2), word) for word in counter], key)
    assert batch.shape == (3, 2, 4) and (batch == np.array(words, dtype=np.uint32)).all()


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**63 - 1])
def test_noise_is_addressed_by_seed_position_and_token(seed: int) -> None:
    noise = gumbel_noise([seed, seed], [3, 2**31], 10)
    assert noise.shape == (2, 10) and noise.dtype == np.float32
    for row, position in enumerate([3, 2**31]):
        for token in range(10):
            word = philox((token // 4, position, 0, 0), (seed & F, seed >> 32))[token % 4]
            uniform = (int(word) + 0.5) / 2**32
            assert noise[row, token] == np.float32(-math.log(-math.log(uniform)))
    assert np.array_equal(gumbel_noise([seed], [3], 7), noise[:1, :7])


def test_other_addresses_give_other_noise() -> None:
    rows = gumbel_noise([1, 2, 1, 1 + 2**32], [0, 0, 1, 0], 64)
    assert len(np.unique(rows)) == rows.size


def logits_of(probability: list[float]) -> np.ndarray:
    return np.log(np.array(probability)).astype(np.float32)


def count_draws(logits: np.ndarray, params: SamplingParams, draws: int = 4000) -> np.ndarray:
    tokens = [draw(logits, params, seed=11, position=position) for position in range(draws)]
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    expected = counts.sum() * probability
    return float(((counts - expected) ** 2 / expected).sum())


CHI_SQUARE_5_AT_1_PERCENT = 15.086
CHI_SQUARE_2_AT_1_PERCENT = 9.210


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_softmax(temperature: float) -> None:
    logits = logits_of([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    probability = np.exp(logits / temperature)
    counts = count_draws(logits, SamplingParams(temperature=temperature))
    assert chi_square(counts, probability / probability.sum()) < CHI_SQUARE_5_AT_1_PERCENT


def test_frequencies_match_the_filtered_softmax() -> None:
    logits = logits_of([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    counts = count_draws(logits, SamplingParams(temperature=1.0, top_k=3))
    assert counts[3:].sum() == 0
    kept = np.array([0.4, 0.25, 0.15])
    assert chi_square(counts[:3], kept / kept.sum()) < CHI_SQUARE_2_AT_1_PERCENT


def test_temperature_zero_takes_the_first_of_the_best() -> None:
    assert draw([1.0, 3.0, 3.0, np.nan], SamplingParams(), seed=0, position=0) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-10])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert {draw([1.0, 3.0, 2.999], params, seed=s, position=0) for s in range(50)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_drawn_and_infinity_always(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert draw([np.nan, np.inf, 2.0], params, seed=1, position=0) == 1
    assert draw([np.nan, -np.inf, 2.0], params, seed=1, position=0) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[np.nan, -np.inf], [-np.inf], []], ids=str)
def test_a_row_without_finite_logit_is_an_error(logits: list[float], temperature: float) -> None:
    with pytest.raises(ValueError, match="no finite logit"):
        draw(logits, SamplingParams(temperature=temperature), seed=0, position=0)


def kept_by_loops(logits: list[float], params: SamplingParams) -> set[int]:
    """Top-k, top-p and min-p, a token at a time."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        order = order[: params.top_k]
    weight = {
        token: math.exp((logits[token] - max(logits)) / params.temperature) for token in order
    }
    total, reached, kept = sum(weight.values()), 0.0, []
    for token in order:
        if kept and params.top_p < 1.0 and reached >= params.top_p * total:
            break
        kept.append(token)
        reached += weight[token]
    return {token for token in kept if weight[token] >= params.min_p * weight[kept[0]]}


@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.5, 2.0]), min_size=1, max_size=8),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1e-9, 0.31, 0.57, 0.83, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.37, 1.0]),
    temperature=st.sampled_from([0.7, 1.0, 3.0]),
)
def test_filters_keep_what_loops_keep(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    filtered = filter_logits(np.array(logits, dtype=np.float32), params)
    kept = set(np.flatnonzero(filtered > -np.inf).tolist())
    assert kept == kept_by_loops(logits, params)
    for token in kept:
        assert filtered[token] == pytest.approx((logits[token] - max(logits)) / temperature)


def test_ties_at_the_boundary_stay_by_token_id() -> None:
    tied = np.zeros(5, dtype=np.float32)
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.4),
    ):
        assert np.flatnonzero(filter_logits(tied, params) > -np.inf).tolist() == [0, 1]


def adjusted_by_loops(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    result = list(logits)
    for token in {*prompt, *output}:
        if result[token] > 0:
            result[token] /= params.repetition_penalty
        else:
            result[token] *= params.repetition_penalty
    for token in output:
        result[token] -= params.frequency_penalty
    for token in set(output):
        result[token] -= params.presence_penalty
    for token, value in params.logit_bias:
        result[token] += value
    return result


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=4, max_size=4),
    prompt=st.lists(st.integers(0, 3), max_size=5),
    output=st.lists(st.integers(0, 3), max_size=5),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 0.25, -2.0]),
    bias=st.sampled_from([(), ((0, 5.0), (3, -100.0), (0, 1.0))]),
)
def test_penalties_and_bias_match_loops(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: tuple[tuple[int, float], ...],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
    )
    adjusted = adjust_logits(logits, params, (prompt, output))
    expected = adjusted_by_loops(logits, params, prompt, output)
    np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)


def test_end_tokens_wait_for_min_tokens() -> None:
    params, logits = SamplingParams(min_tokens=2), [1.0, 9.0, 3.0]
    tokens = [draw(logits, params, 0, 0, ([5], [0] * n), frozenset({1, 99})) for n in range(4)]
    assert tokens == [2, 2, 1, 1]


def test_nothing_to_draw_but_a_held_back_end_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finite logit"):
        draw([1.0, -np.inf], SamplingParams(min_tokens=1), 0, 0, ([], []), frozenset({0}))


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    params = SamplingParams(logit_bias=((-1, 100.0), (3, 100.0)), repetition_penalty=2.0)
    assert adjust_logits([1.0, 2.0, 3.0], params, ([-1, 7], [3])).tolist() == [1.0, 2.0, 3.0]


def test_history_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(ValueError, match="history"):
        adjust_logits([1.0, 2.0], SamplingParams(presence_penalty=1.0))


def test_logits_given_are_left_as_they_were() -> None:
    logits = np.array([1.0, np.nan, 3.0], dtype=np.float32)
    before = logits.copy()
    params = SamplingParams(temperature=1.0, top_k=1, frequency_penalty=1.0, logit_bias=((0, 1.0),))
    draw(logits, params, 0, 0, ([0], [2]))
    np.testing.assert_array_equal(logits, before)
