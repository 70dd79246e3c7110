"""Library calls over a fixed number of rows, so that the same code runs for every row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

FIXED_ROWS = 128


def in_slices(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run over x [T, ..], up to FIXED_ROWS rows at a time."""
    pieces = [run(rows) for rows in x.split(FIXED_ROWS)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def at_fixed_size(rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """run over up to FIXED_ROWS rows [t, ..] among exactly so many: zeros stand behind them."""
    missing = FIXED_ROWS - len(rows)
    if missing == 0:
        return run(rows)
    padded = functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    return run(padded)[: len(rows)]
