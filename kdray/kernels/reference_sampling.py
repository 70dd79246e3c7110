"""core.sampling.draw for many rows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kdray.core.sampling import (
    Float32Array,
    adjust_logits,
    adjusts,
    clean_logits,
    drop_unlikely,
    drops,
    gumbel_noise,
    temper,
)
from kdray.kernels.ops import SamplingRows

NOISE_AT_ONCE = 1 << 20  # numbers of noise made in one go, to bound the memory


def sample_tokens(logits: NDArray[np.float32], rows: SamplingRows) -> NDArray[np.int32]:
    """[M, V] -> [M] int32. Raises ValueError naming the row where no token is left to draw."""
    if all(params.temperature == 0.0 and not adjusts(params) for params in rows.params):
        token: NDArray[np.int32] = logits.argmax(axis=1).astype(np.int32)
        # NaN and +inf come out as the largest; then, and only then, the rows need cleaning first.
        if np.isfinite(logits[np.arange(len(logits)), token]).all():
            return token
    values = clean_logits(logits)
    _adjust(values, rows)
    _check_drawable(values)
    temperature = np.array([params.temperature for params in rows.params], dtype=np.float64)
    warm = np.flatnonzero(temperature > 0.0)
    stride = max(1, NOISE_AT_ONCE // max(1, values.shape[1]))
    for start in range(0, len(warm), stride):
        some = warm[start : start + stride]
        values[some] = _noisy(temper(values[some], temperature[some]), some.tolist(), rows)
    token = values.argmax(axis=1).astype(np.int32)
    return token


def _adjust(values: Float32Array, rows: SamplingRows) -> None:
    for row, params in enumerate(rows.params):
        if not adjusts(params):
            continue
        try:
            values[row] = adjust_logits(
                values[row], params, rows.history[row], rows.end_token_ids[row]
            )
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error


def _check_drawable(values: Float32Array) -> None:
    dead = values.max(axis=1, initial=-np.inf) == -np.inf
    if dead.any():
        raise ValueError(
            f"row {int(dead.argmax())}: no finite logit is left to draw from; "
            "the model's weights or its input are broken"
        )


def _noisy(tempered: Float32Array, which: list[int], rows: SamplingRows) -> Float32Array:
    """Filtered, tempered logits plus noise of the rows `which`: [len(which), V]."""
    for i, row in enumerate(which):
        if drops(rows.params[row]):
            tempered[i] = drop_unlikely(tempered[i], rows.params[row])
    seeds, positions = [rows.seed[row] for row in which], [rows.position[row] for row in which]
    tempered += gumbel_noise(seeds, positions, tempered.shape[1])
    return tempered
