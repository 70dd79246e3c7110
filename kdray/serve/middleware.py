"""The one place where exceptions become HTTP answers, and the check of keys in front of it all."""

from __future__ import annotations

import logging
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdray.serve.failure import ClientLeft, Failure, failure_of
from kdray.serve.keys import KeyRing

log = logging.getLogger("kdray.serve")
OPEN_PATHS = frozenset({"/health"})


class Watcher(Protocol):
    """Told of answers, for the metrics and the log."""

    def responded(self, status: int) -> None: ...

    def refused(self, code: str) -> None: ...


class CheckKeys:
    """Lets nobody in without a key, where there are keys; only /health needs none.

    Control routes ask for an admin key besides, in their own code.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            self._keys.check_api(Headers(scope=scope).get("authorization"))
        await self._app(scope, receive, send)


class AnswerErrors:
    """Answers whatever the application raises in OpenAI's shape, unless an answer has begun."""

    def __init__(self, app: ASGIApp, watcher: Watcher) -> None:
        self._app = app
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                self._watcher.responded(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientLeft:
            return  # nobody is there to read an answer
        except Exception as error:
            if begun:
                raise
            self._watcher.refused(failure_of(error).code or "other")
            await _answer(error)(scope, receive, watched)


async def answer_http_error(_: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: an unknown path, a method that is not allowed."""
    return _answer(error)


def _answer(error: Exception) -> JSONResponse:
    failure = failure_of(error)
    if failure.is_news:
        log.error("answered %d: %s", failure.status, failure.message, exc_info=error)
    return reply(failure)


def reply(failure: Failure) -> JSONResponse:
    return JSONResponse(failure.body(), failure.status, headers=dict(failure.headers))
