"""Tokens a second from measured rounds and an assumed acceptance, here and on 8 RTX PRO 6000.

    tokens/s      = streams * E / round
    E             = 1 + the sum over a tree's nodes of the probability that the target goes there
    here          : round as measured (the collectives of a looped-back rank are not in it)
    RTX PRO 6000  : round = floor_v / f_v + floor_d / f_d + rest + the ranks' sums
        floor_v, floor_d   of verify and draft at that card's copy and matmul speeds (RTX)
        f_v, f_d           floor over measured time of the same step on this GPU
        rest               build, accept and commit as measured here
        sums               1 + 2 a layer of the step's rows; of a drafter that ranks share 2 + 2 a
                           layer of its blocks' rows, and two of a few numbers. One of rows * width
                           * 2 bytes takes 7 us + bytes / 3.3 GB/s or 20 us + 1.75 bytes / 40 GB/s,
                           what is less
    at best       : the same with floor_v + late_v and floor_d + late_d for the quotients; late is
                    measured time less the floor on this GPU

The two differ by what keeps a step from its floor: bytes that come slower than a copy's, which take
longer on a card with fewer of them a second, or launches that wait for one another, which do not.
At few rows it is mostly the latter.

E takes `hits`, the chance of the drafter's first token at each depth where all before were right;
`siblings`, the chance of its second, third, .. where the first is wrong; and `off_path`, the chance
of its first behind a sibling, where the drafter, which guesses all depths at once, knows less.
Trees are those that the product builds for these chances.

Sources of what is assumed. The card: 1.45 TB/s, the middle of what its peer test copies (1.38 to
1.49), and 400 TFLOP/s, four fifths of what its data sheet comes to in dense bf16. Sums: a fit to
public NCCL and one-shot figures on eight such cards. Hits: a public engine's nightly runs accept
2.66 tokens a step with the K2.6 DFlash drafter in chains of 7, which a constant rate of 0.634
gives. Siblings and off_path: measured by others with a 4B model's DFlash drafter; where its first
token is wrong the second is right in 37 % and one of three in 58 %, and behind a sibling 22 % hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from step_floor import Ceilings, Work, floor_ms

from kdray.config import SyntheticAcceptance
from kdray.core.acceptance import AcceptanceProfile

HITS = (0.634,) * 7
SIBLINGS = SyntheticAcceptance(hits=HITS).siblings
OFF_PATH = SyntheticAcceptance(hits=HITS).off_path
RTX = Ceilings(bytes_per_us=1.45e6, flops_per_us=400e6)
SUMMED_ITEM = 2  # bytes of a bf16 number
# Public figures on 8 RTX PRO 6000, K2.6 in INT4, empty context, all streams together.
PUBLIC = {1: {"plain": 92.0, "eagle3": 125.0}, 128: {"plain": 2223.0, "eagle3": 2510.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """A round on this GPU: milliseconds of its verbs, and what verify and draft do in it.

    sums   of the ranks: how many, of how many bytes each
    """

    mode: str
    streams: int
    nodes: int
    round_ms: float
    draft_ms: float
    verify_ms: float
    rest_ms: float
    verify: Sequence[Work]
    draft: Sequence[Work]
    sums: Sequence[tuple[int, int]]

    def elsewhere_ms(self, here: Ceilings, there: Ceilings) -> float:
        """The round on a rank of eight other cards (above)."""
        verify = floor_ms(self.verify, there) * self.verify_ms / floor_ms(self.verify, here)
        drafted = floor_ms(self.draft, here)
        draft = floor_ms(self.draft, there) * self.draft_ms / drafted if drafted else 0.0
        return verify + draft + self.rest_ms + self._sums_ms

    def at_best_ms(self, here: Ceilings, there: Ceilings) -> float:
        """The same where all that is above a floor here takes as long there."""
        works = (*self.verify, *self.draft)
        late = self.verify_ms + self.draft_ms - floor_ms(works, here)
        return floor_ms(works, there) + late + self.rest_ms + self._sums_ms

    @property
    def _sums_ms(self) -> float:
        return sum(count * sum_ms(size) for count, size in self.sums)


def sum_ms(size: int) -> float:
    """An all-reduce of `size` bytes among eight cards on PCIe (above)."""
    return min(7e-3 + size / 3.3e6, 20e-3 + 1.75 * size / 40e6)


def predictions(
    measured: MeasuredRound, acceptance: AcceptanceProfile, here: Ceilings
) -> dict[str, float | None]:
    """Metrics of a row that is labelled a prediction."""
    length = acceptance.length(measured.mode, measured.nodes)
    there_ms, best_ms = measured.elsewhere_ms(here, RTX), measured.at_best_ms(here, RTX)
    gained = 1e3 * measured.streams * length
    public = PUBLIC.get(measured.streams, {})
    return {
        "assumed_accept_length": length,
        "tokens_per_s_here": gained / measured.round_ms,
        "rtx_round_ms": there_ms,
        "tokens_per_s_8x_rtx_pro_6000": gained / there_ms,
        "rtx_round_ms_at_best": best_ms,
        "tokens_per_s_8x_rtx_pro_6000_at_best": gained / best_ms,
        "public_plain_tokens_per_s": public.get("plain"),
        "public_eagle3_tokens_per_s": public.get("eagle3"),
    }
