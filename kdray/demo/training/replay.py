"""Accept lengths without decoding again: replay of drafts over texts that are already written.

Speculation never changes the text, so a draft made at a root is accepted as far as the written text
follows it. One pass drafts at every position; a walk then takes the rounds that would have been.
As in the product the prompt's own pass gives the first token, which is the root of the first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.generation import GeneratedTexts
from kdray.demo.training.target import DemoTarget
from kdray.demo.training.train_drafter import next_tokens

BUDGETS = (4, 7, 8, 16, 32)


@dataclass(frozen=True)
class Rounds:
    """Tokens committed (all but the first) and rounds taken, per text [N] each."""

    tokens: Tensor
    rounds: Tensor

    def accept_length(self, rows: Sequence[int] | Tensor) -> float:
        """Tokens a round, pooled over some texts."""
        rows = torch.as_tensor(rows, device=self.tokens.device)
        return float(self.tokens[rows].sum() / self.rounds[rows].sum())


def replay(
    target: DemoTarget,
    drafter: DemoDrafter,
    texts: GeneratedTexts,
    budgets: Sequence[int] = BUDGETS,
    chunk: int = 16,
) -> dict[str, Rounds]:
    """Rounds of ``chain_B`` and ``tree_B`` for every budget, over all texts."""
    accepted: dict[str, Tensor] = {}
    with torch.no_grad():
        for start in range(0, len(texts.tokens), chunk):
            rows = slice(start, start + chunk)
            part = GeneratedTexts(texts.tokens[rows], texts.prompt[rows], texts.end[rows])
            for name, lengths in _accepted(target, drafter, part, budgets).items():
                table = accepted.setdefault(name, torch.zeros_like(texts.tokens))
                table[rows] = lengths
    return {name: _walk(texts, table) for name, table in accepted.items()}


def _accepted(
    target: DemoTarget, drafter: DemoDrafter, texts: GeneratedTexts, budgets: Sequence[int]
) -> dict[str, Tensor]:
    """Drafts accepted at every position [B, S] that can be a root; zero elsewhere."""
    tokens, depth = texts.tokens, drafter.shape.depth
    tokens = tokens[:, : int(texts.end.max())]
    span = max(1, int((texts.end - texts.prompt).max()) - 1)
    roots = texts.prompt[:, None] + torch.arange(span, device=tokens.device)
    roots = torch.minimum(roots, texts.end[:, None] - 1)
    logits = drafter(target, tokens, target(tokens).features, roots).float()
    truth, there = next_tokens(tokens, texts.end, roots, depth)
    scores, ids = logits.log_softmax(-1).topk(max(budgets), dim=-1)
    right = (ids == truth[..., None]) & there[..., None]
    accepted = {}
    chain = right[..., 0].long().cumprod(-1)
    for budget in sorted({min(budget, depth) for budget in budgets}):
        accepted[f"chain_{budget}"] = chain[..., :budget].sum(-1)
    trees = best_prefix_accepts(scores.flatten(0, 1), right.flatten(0, 1), budgets)
    for budget, lengths in trees.items():
        accepted[f"tree_{budget}"] = lengths.view(roots.shape)
    empty = torch.zeros_like(texts.tokens)
    return {name: empty.scatter(1, roots, lengths) for name, lengths in accepted.items()}


def best_prefix_accepts(scores: Tensor, right: Tensor, budgets: Sequence[int]) -> dict[int, Tensor]:
    """Accepted drafts [M] of the trees of the B most probable prefixes.

    scores [M, L, K] log-probs, descending; right [M, L, K]: the candidate is the written token.
    Level by level the best max(B) prefixes are kept: a better one cannot descend from any other.
    """
    rows, depth, _ = scores.shape
    largest = max(budgets)
    beam = scores.new_zeros(rows, 1)
    on_path = torch.ones(rows, 1, dtype=torch.bool, device=scores.device)
    all_scores, all_on_path = [], []
    for level in range(depth):
        children = (beam[:, :, None] + scores[:, None, level]).flatten(1)
        child_on_path = (on_path[:, :, None] & right[:, None, level]).flatten(1)
        best = children.topk(min(largest, children.shape[1]), dim=-1)
        beam, on_path = best.values, child_on_path.gather(1, best.indices)
        all_scores.append(beam)
        all_on_path.append(on_path)
    order = torch.cat(all_scores, 1).topk(largest, dim=-1).indices
    # Exactly one prefix of each depth is on the written path, so their number is the depth reached.
    reached = torch.cat(all_on_path, 1).gather(1, order).long().cumsum(-1)
    return {budget: reached[:, budget - 1] for budget in budgets}


def _walk(texts: GeneratedTexts, accepted: Tensor) -> Rounds:
    """Take rounds from the first token to the end; the end cuts the last round short."""
    root, last = texts.prompt.clone(), texts.end - 1
    tokens = torch.zeros_like(root)
    rounds = torch.zeros_like(root)
    while bool((root < last).any()):
        active = root < last
        taken = accepted.gather(1, root[:, None])[:, 0] + 1
        taken = torch.minimum(taken, last - root) * active
        tokens += taken
        rounds += active
        root = root + taken
    return Rounds(tokens, rounds)
