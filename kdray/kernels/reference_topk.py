"""The best tokens of rows of logits in torch, of a whole vocabulary and of its shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kdray.core.tree import ABSENT, FRACTION_BITS, MIN_LOGPROB
from kdray.kernels.ops import NO_ID, PartialTopk


def topk_logprob(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As in Ops; a logit of +inf counts as the largest float32."""
    rows = _numbers(logits.reshape(-1, logits.shape[-1]))
    token = _topk_tokens(rows, min(k, rows.shape[1]))
    score = _quantise(rows.gather(1, token) - rows.logsumexp(dim=1, keepdim=True))
    missing = (0, k - token.shape[1])
    token = F.pad(token.int(), missing, value=0)
    score = F.pad(score, missing, value=ABSENT)
    shape = (*logits.shape[:-1], k)
    return token.reshape(shape), score.reshape(shape)


def topk_partial(logits: Tensor, k: int, first_id: int) -> PartialTopk:
    """As in Ops; mass [.., 0] holds the bits of the logsumexp in float64."""
    rows = _numbers(logits)
    token = _topk_tokens(rows, min(k, rows.shape[1]))
    missing = (0, k - token.shape[1])
    mass = rows.double().logsumexp(dim=1, keepdim=True).view(torch.int64)
    return PartialTopk(
        value=F.pad(rows.gather(1, token), missing, value=-torch.inf),
        id=F.pad(token.int() + first_id, missing, value=NO_ID),
        mass=F.pad(mass, (0, 2)),
    )


def merge_topk(shards: PartialTopk) -> tuple[Tensor, Tensor]:
    """As in Ops, of what topk_partial here has found."""
    count, rows, k = shards.value.shape
    total = shards.mass[..., :1].view(torch.float64).logsumexp(dim=0)
    value, token = (x.transpose(0, 1).reshape(rows, count * k) for x in (shards.value, shards.id))
    by_id = token.argsort(dim=1, stable=True)
    by_value = value.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
    best = by_id.gather(1, by_value)[:, :k]
    token = token.gather(1, best)
    score = _quantise(value.gather(1, best) - total.float())
    return token.masked_fill(token == NO_ID, 0), score


def _numbers(logits: Tensor) -> Tensor:
    """In float32, NaN as -inf and +inf as the largest number."""
    largest = torch.finfo(torch.float32).max
    return logits.float().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def _topk_tokens(rows: Tensor, k: int) -> Tensor:
    """The k best columns of [M, V] (no NaN), value descending, then column ascending: [M, k] int64.

    torch.topk picks any of equal values, in any order. Both are put right afterwards.
    """
    if k == 0:
        return rows.new_zeros(len(rows), 0, dtype=torch.int64)
    best = rows.topk(k, dim=1)
    kth = best.values[:, -1:]
    token = best.indices
    ambiguous = (rows == kth).sum(dim=1) > (best.values == kth).sum(dim=1)
    if ambiguous.any():
        token[ambiguous] = _first_columns(rows[ambiguous], kth[ambiguous], k)
    token = token.sort(dim=1).values
    order = rows.gather(1, token).sort(dim=1, descending=True, stable=True).indices
    return token.gather(1, order)


def _first_columns(rows: Tensor, kth: Tensor, k: int) -> Tensor:
    """All columns above the k-th value [M, 1], then the first of those equal to it: k a row."""
    size = rows.shape[1]
    column = torch.arange(size, dtype=torch.int32, device=rows.device)
    precedence = torch.where(rows > kth, column - size, column).masked_fill(rows < kth, size)
    chosen = precedence.topk(k, dim=1, largest=False).values
    return torch.where(chosen < 0, chosen + size, chosen).long()


def _quantise(logprob: Tensor) -> Tensor:
    """core.tree.quantise on a device: a float32 times a power of two is exact."""
    absent = logprob.isnan() | logprob.isneginf()
    clamped = logprob.nan_to_num(0.0).clamp(MIN_LOGPROB, 0.0)
    return torch.round(clamped * 2**FRACTION_BITS).int().masked_fill(absent, ABSENT)
