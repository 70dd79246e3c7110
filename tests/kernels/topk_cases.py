"""Rows of logits that try a top-k kernel, and what it must answer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kdray.core.tree import ABSENT, quantise
from kdray.kernels.reference import ReferenceOps

SCORE_ERROR = 2  # units of 2^-22 between a kernel's score and the float64 one

KINDS = (
    "normal", "peaky", "band", "flat", "rising", "falling", "steps", "holes", "few", "dead",
    "infinite", "huge", "zeros",
)  # fmt: skip


def logits_of(
    kind: str, rows: int, vocab: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Tensor:
    """[rows, vocab] logits of a kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, vocab, generator=generator, device=device)

    def chosen(share: float) -> Tensor:
        return torch.rand(rows, vocab, generator=generator, device=device) < share

    nothing, ramp = -torch.inf, torch.linspace(-9, 9, vocab, device=device).expand(rows, vocab)
    logits = {
        "normal": lambda: normal() * 2.5,
        "peaky": lambda: torch.where(chosen(0.001), normal() * 8 + 12, normal()),
        "band": lambda: 4 + normal() * 0.02,  # bfloat16 has a handful of values there: mass ties
        "flat": lambda: torch.full((rows, vocab), 3.25, device=device),
        "rising": lambda: ramp,
        "falling": lambda: ramp.flip(1),
        "steps": lambda: (torch.arange(vocab, device=device) // 700 * 0.5).expand(rows, vocab),
        "holes": lambda: torch.where(chosen(0.3), nothing, normal()).where(~chosen(0.1), torch.nan),
        "few": lambda: torch.where(chosen(4 / vocab), normal(), nothing),
        "dead": lambda: torch.where(chosen(0.5), nothing, torch.nan),
        "infinite": lambda: torch.where(chosen(0.002), torch.inf, normal()),
        "huge": lambda: normal() * 1e30,
        "zeros": lambda: torch.where(chosen(0.5), -0.0, 0.0) - (normal() > 2).float(),
    }[kind]()
    return logits.to(dtype).contiguous()


def assert_exact(logits: Tensor, k: int, token: Tensor, score: Tensor) -> None:
    """Tokens equal the reference's; scores lie within SCORE_ERROR of the float64 ones."""
    reference = ReferenceOps(logits.device).topk_logprob(logits, k)
    assert token.dtype == score.dtype == torch.int32
    wrong = (token != reference[0]).any(dim=1)
    assert not wrong.any(), f"tokens of rows {wrong.nonzero().flatten()[:5].tolist()}"
    wanted = exact_scores(logits, token.long(), k)
    assert torch.equal(score == ABSENT, wanted == ABSENT)
    error = (score.long() - wanted.long()).abs()
    assert error.max().item() <= SCORE_ERROR, f"{int((error > SCORE_ERROR).sum())} scores are off"


def exact_scores(logits: Tensor, token: Tensor, k: int) -> Tensor:
    """Scores [M, k] of tokens [M, k], from a float64 log-softmax."""
    rows = logits.double().nan_to_num(
        nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf
    )
    logprob = rows.gather(1, token) - rows.logsumexp(dim=1, keepdim=True)
    logprob[:, rows.shape[1] :] = -torch.inf  # padding
    scores: Tensor = torch.from_numpy(np.asarray(quantise(logprob.cpu().numpy())))
    return scores.to(logits.device)
