"""GPUs that cannot reach one another directly: the gang starts again through the host's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kdray.actors.gang import Gang
from kdray.actors.placement import Placement
from kdray.actors.room import Room
from kdray.config import EngineConfig
from kdray.errors import LinkError
from kdray.verifier.links import P2P_OFF


@dataclass
class Tries:
    """Stands for Gang._try: the first `failures` of them find broken links."""

    failures: int
    envs: list[dict[str, str]] = field(default_factory=list)

    def __call__(
        self, config: EngineConfig, room: Room, placement: Placement, env: dict[str, str]
    ) -> Gang:
        assert not room.owned, "the second try needs the room"
        self.envs.append(env)
        if len(self.envs) <= self.failures:
            raise LinkError("rank 1 got wrong numbers from rank 0")
        return Gang(config, room, placement, env)


def start(
    monkeypatch: pytest.MonkeyPatch, tries: Tries, *, device: str = "cuda"
) -> tuple[Gang, Room]:
    room = Room(group=None)  # type: ignore[arg-type]
    released: list[Any] = []
    monkeypatch.setattr(Gang, "_try", tries)
    monkeypatch.setattr(Room, "release", lambda self: released.append(self))
    config = EngineConfig(device=device, tp=2)  # type: ignore[arg-type]
    try:
        return Gang.start(config, Placement(), room), room
    finally:
        assert bool(released) == (tries.failures >= len(tries.envs))


def test_links_that_hold_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(P2P_OFF, raising=False)
    tries = Tries(failures=0)
    gang, room = start(monkeypatch, tries)
    assert tries.envs == [{}] and gang._room is room


def test_broken_links_cost_one_more_start_and_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(P2P_OFF, raising=False)
    tries = Tries(failures=1)
    gang, room = start(monkeypatch, tries)
    assert tries.envs == [{}, {P2P_OFF: "1"}] and gang._room is room
    assert "IOMMU" in caplog.text and "ACS" in caplog.text and "rank 1" in caplog.text


def test_links_broken_both_ways_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(P2P_OFF, raising=False)
    tries = Tries(failures=2)
    with pytest.raises(LinkError):
        start(monkeypatch, tries)
    assert len(tries.envs) == 2


@pytest.mark.parametrize("why", ["cpu", "already off"])
def test_nothing_is_tried_twice_where_it_cannot_help(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.delenv(P2P_OFF, raising=False)
    if why == "already off":
        monkeypatch.setenv(P2P_OFF, "1")
    tries = Tries(failures=1)
    with pytest.raises(LinkError):
        start(monkeypatch, tries, device="cpu" if why == "cpu" else "cuda")
    assert tries.envs == [{}]
