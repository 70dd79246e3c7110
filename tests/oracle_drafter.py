"""A drafter that knows the answer, and is right as often as it is told to be."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths, Candidates, PlannedRequest, StepPlan
from kdray.core.tree import ABSENT, quantise


class OracleDrafter:
    """Reads the coming tokens from the whole text of each request.

    sequences   request_id -> all its tokens, prompt and right continuation
    accuracy    how often the right token is the first candidate of its depth; where it is not, it
                stands at some other rank or is absent. 1: always first.

    A function of (seed, request, position), so runs that differ in batch or order draft alike.
    Behind the end of a sequence nothing is drafted.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        sequences: Mapping[str, Sequence[int]],
        *,
        depth: int,
        candidates: int,
        vocab_size: int,
        accuracy: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.depth = depth
        self._sequences = sequences
        self._candidates = min(candidates, vocab_size)
        self._vocab_size = vocab_size
        self._accuracy = accuracy
        self._seed = seed
        self._scores = _scores(self._candidates)

    def propose(self, plan: StepPlan, roots: Tensor) -> Candidates:
        shape = (len(plan.requests), self.depth, self._candidates)
        token = torch.zeros(shape, dtype=torch.int32)
        score = torch.full(shape, ABSENT, dtype=torch.int32)
        for r, request in enumerate(plan.requests):
            if request.budget == 0:
                continue
            sequence = self._sequences[request.request_id]
            if sequence[request.root_position] != int(roots[r]):
                continue  # the text took another way: nothing is known of it
            for depth in range(self.depth):
                row = self._row(request, sequence, request.root_position + 1 + depth)
                token[r, depth, : len(row)] = torch.tensor(row, dtype=torch.int32)
                score[r, depth, : len(row)] = self._scores[: len(row)]
        return Candidates(token=token, score=score)

    def extend(
        self, plan: StepPlan, paths: AcceptedPaths, features: Tensor, row_start: Sequence[int]
    ) -> None:
        """Nothing to learn."""

    def _row(self, request: PlannedRequest, sequence: Sequence[int], position: int) -> list[int]:
        """Candidates for a position, best first."""
        if position >= len(sequence):
            return []
        dice = random.Random(f"{self._seed}/{request.request_id}/{position}")
        right = sequence[position]
        # One more token than is needed, so that dropping the right one leaves enough.
        drawn = dice.sample(range(self._vocab_size), min(self._candidates + 1, self._vocab_size))
        wrong = [token for token in drawn if token != right][: self._candidates]
        is_right = dice.random() < self._accuracy
        rank = 0 if is_right else dice.randint(1, self._candidates)
        return [*wrong[:rank], right, *wrong[rank:]][: self._candidates]


def _scores(candidates: int) -> Tensor:
    """Log-probs of a row, in fixed point: the first is sure, the others share what is left."""
    shares = [0.9, *(0.1 * 0.5**rank for rank in range(1, candidates))]
    return torch.from_numpy(quantise([math.log(share) for share in shares]))
