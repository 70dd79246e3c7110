"""The control channel of a step over ZeroMQ: one ordered PUSH/PULL pair a rank, nothing lost.

(PUB/SUB would drop what is sent before a rank has subscribed.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from kdray.errors import RankFailed

_LINGER_MS = 1000
_IDLE_MS = 1000


class ZmqSender:
    """Rank 0's end: binds one endpoint a rank (ipc:// on one host, tcp:// between hosts)."""

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float) -> None:
        self._context = zmq.Context()
        self._sockets = [self._bind(endpoint, timeout_s) for endpoint in endpoints]

    def send(self, message: bytes) -> None:
        """Raises RankFailed where a rank has taken nothing for the time-out."""
        for index, socket in enumerate(self._sockets):
            try:
                socket.send(message)
            except zmq.Again:
                raise RankFailed(f"rank {index + 1} takes no step headers any more") from None

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(_LINGER_MS)
        self._context.term()

    def _bind(self, endpoint: str, timeout_s: float) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        socket.bind(endpoint)
        return socket


class ZmqReceiver:
    """Another rank's end. Waits without limit: an idle engine sends nothing.

    idle   called about once a second while nothing comes
    """

    def __init__(self, endpoint: str, idle: Callable[[], None] = lambda: None) -> None:
        self._idle = idle
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.connect(endpoint)

    def receive(self) -> bytes:
        while not self._socket.poll(_IDLE_MS):
            self._idle()
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
