"""Ranks whose data does not arrive, or not as it was sent, do not start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kdray.errors import LinkError
from kdray.model.parallel import Shard, SoloCollectives
from kdray.verifier.links import check_links
from tests.thread_ranks import Meeting, ThreadCollectives

CPU = torch.device("cpu")


@dataclass(frozen=True)
class BrokenCollectives(ThreadCollectives):
    """`call` brings this rank one wrong number, from the last rank where ranks can be told."""

    call: str

    def deal_rows(self, x: Tensor) -> Tensor:
        return self._spoilt("deal_rows", super().deal_rows(x))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._spoilt("all_reduce", super().all_reduce(x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._spoilt("broadcast", super().broadcast(x))

    def _spoilt(self, call: str, x: Tensor) -> Tensor:
        if call == self.call:
            x.view(-1)[-1] += 1
        return x


def check_all(collectives: list[ThreadCollectives]) -> list[BaseException | None]:
    """What each rank raised; where one leaves, those that wait for it do too."""
    size = len(collectives)

    def check(rank: int) -> None:
        try:
            check_links(collectives[rank], Shard(rank, size), CPU)
        except LinkError:
            collectives[rank].meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(check, rank) for rank in range(size)]
        return [call.exception() for call in calls]


@pytest.mark.parametrize("size", [2, 3])
def test_sound_links_pass(size: int) -> None:
    meeting = Meeting(size)
    ranks = [ThreadCollectives(meeting, rank) for rank in range(size)]
    assert check_all(ranks) == [None] * size


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("deal_rows", "rank 1 got wrong numbers .* from rank 2"),
        ("all_reduce", "rank 1 got a wrong sum"),
        ("broadcast", "rank 1 got .* wrong numbers broadcast by rank 0"),
    ],
)
def test_a_wrong_number_is_found_and_its_ranks_named(call: str, says: str) -> None:
    meeting = Meeting(3)
    ranks: list[ThreadCollectives] = [ThreadCollectives(meeting, rank) for rank in range(3)]
    ranks[1] = BrokenCollectives(meeting, 1, call)
    error = check_all(ranks)[1]
    assert isinstance(error, LinkError)
    with pytest.raises(LinkError, match=says):
        raise error


def test_one_rank_has_no_links() -> None:
    check_links(SoloCollectives(), Shard(), CPU)
