"""The rows of one forward pass of the target, laid out flat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdray.kernels.attention_rows import AnyAttentionBatch
from kdray.kernels.ops import LiveRows


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """T rows: every request's known tokens, then its draft nodes, request after request.

    token      [T] int64
    position   [T] int64: the token's place in its text (draft nodes: root position + depth)
    slot       [T] int64: the cache slot that takes the row's KV
    attention  who may see whom
    live       which rows are no padding; None: all
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    attention: AnyAttentionBatch
    live: LiveRows | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetOutput:
    """What the forward pass leaves behind.

    hidden     [T, E] the last layer's output after the final norm (what the head reads)
    features   [T, n * E] outputs of the tapped layers side by side; [T, 0] without taps
    """

    hidden: Tensor
    features: Tensor
