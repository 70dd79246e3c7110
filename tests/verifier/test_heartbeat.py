"""Signs of life: written by a rank, read by others; and an idle receiver gives them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdray.verifier import channel
from kdray.verifier.channel import ZmqReceiver, ZmqSender
from kdray.verifier.heartbeat import Heartbeat, heartbeat_age


def test_no_rank_no_age(tmp_path: Path) -> None:
    path = tmp_path / "beat-1"
    assert heartbeat_age(str(path)) is None
    path.write_bytes(b"")
    assert heartbeat_age(str(path)) is None
    path.write_bytes(bytes(8))
    assert heartbeat_age(str(path)) is None


def test_a_beat_makes_it_young_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5_000_000_000
    monkeypatch.setattr("kdray.verifier.heartbeat.time.monotonic_ns", lambda: now)
    path = str(tmp_path / "beat-1")
    beat = Heartbeat(path).beat
    now += 2_500_000_000
    assert heartbeat_age(path) == 2.5
    beat()
    now += 500_000_000
    assert heartbeat_age(path) == 0.5


def test_a_receiver_that_waits_is_idle_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_IDLE_MS", 1)
    endpoint = f"ipc://{tmp_path}/rank-1"
    sender = ZmqSender([endpoint], timeout_s=5.0)
    idle = 0

    def count() -> None:
        nonlocal idle
        idle += 1
        if idle == 3:
            sender.send(b"step")

    receiver = ZmqReceiver(endpoint, count)
    assert receiver.receive() == b"step"
    assert idle >= 3
    receiver.close()
    sender.close()
