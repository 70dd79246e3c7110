"""Sums over the ranks' memory: where ranks may not read it, nothing of it is opened."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from kdray.model.parallel import Collectives, Shard
from kdray.verifier import short_sums
from kdray.verifier.links import P2P_OFF

NOBODY = cast(Collectives, object())  # asked for anything it fails


class Opened(Exception):
    pass


@pytest.fixture(autouse=True)
def regions_that_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_regions(*_: object) -> None:
        raise Opened

    monkeypatch.setattr(short_sums, "open_regions", open_regions)


@pytest.mark.parametrize("said, opens", [(None, True), ("0", True), ("1", False)])
def test_no_memory_is_opened_where_direct_transfers_are_off(
    monkeypatch: pytest.MonkeyPatch, said: str | None, opens: bool
) -> None:
    if said is None:
        monkeypatch.delenv(P2P_OFF, raising=False)
    else:
        monkeypatch.setenv(P2P_OFF, said)
    if opens:
        with pytest.raises(Opened):
            short_sums.open_short_sums(NOBODY, Shard(0, 2), torch.device("cpu"))
    else:
        assert short_sums.open_short_sums(NOBODY, Shard(0, 2), torch.device("cpu")) is None


def test_one_rank_has_nobody_to_read() -> None:
    assert short_sums.open_short_sums(NOBODY, Shard(0, 1), torch.device("cpu")) is None
