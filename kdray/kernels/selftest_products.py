"""The self-test's cases of products of few rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kdray.kernels.ops import Ops
from kdray.kernels.selftest_inputs import Inputs


def per_head(ops: Ops, given: Inputs) -> list[Tensor]:
    sizes = given.sizes
    x = given.drawn(12, 5, sizes.heads, sizes.nope)
    up = given.drawn(13, sizes.heads, sizes.latent, sizes.nope).mT * sizes.nope**-0.5
    given.settle()
    return [ops.per_head(x, up)]


def linear(ops: Ops, given: Inputs) -> list[Tensor]:
    """A narrow product by both precisions, and the one behind attention with what it adds to."""
    sizes = given.sizes
    x, heads = given.drawn(14, 5, sizes.width), given.drawn(15, 5, sizes.heads * sizes.value)
    narrow = given.matrix(16, sizes.width, 64)
    behind = given.matrix(26, sizes.heads * sizes.value, sizes.width)
    wide = ops.linear(x, narrow, dtype=torch.float32)
    return [ops.linear(x, narrow), wide, ops.linear(heads, behind, add=x)]


def norm_linear(ops: Ops, given: Inputs) -> list[Tensor]:
    """Queries from their latent, which is a part of a wider product."""
    sizes = given.sizes
    if not sizes.query_latent:
        return []
    wide = given.drawn(33, 5, sizes.query_latent + sizes.latent + sizes.rope)
    up = given.matrix(34, sizes.query_latent, sizes.heads * (sizes.nope + sizes.rope))
    norm = given.norm(sizes.query_latent)
    return [ops.norm_linear(wide[:, : sizes.query_latent], norm, up)]


def gated_linear(ops: Ops, given: Inputs) -> list[Tensor]:
    width = given.sizes.width
    return [ops.gated_linear(given.drawn(17, 5, width), given.matrix(18, width, 128))]


def linear_and_gated(ops: Ops, given: Inputs) -> list[Tensor]:
    """A router's logits, and the gates of an MLP that reads the same rows."""
    x, width = given.drawn(27, 5, given.sizes.width), given.sizes.width
    router, gate_up = given.matrix(28, width, 64), given.matrix(29, width, 128)
    return list(ops.linear_and_gated(x, router, gate_up, dtype=torch.float32))
