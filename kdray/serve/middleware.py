"""The one place where exceptions become HTTP answers."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdray.serve.failure import ClientLeft, Failure, failure_of

log = logging.getLogger("kdray.serve")


class AnswerErrors:
    """Answers whatever the application raises in OpenAI's shape, unless an answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientLeft:
            return  # nobody is there to read an answer
        except Exception as error:
            if begun:
                raise
            await _answer(error)(scope, receive, send)


async def answer_http_error(_: Request, error: Exception) -> JSONResponse:
    """What the framework itself refuses: an unknown path, a method that is not allowed."""
    return _answer(error)


def _answer(error: Exception) -> JSONResponse:
    failure = failure_of(error)
    if failure.status >= 500:
        log.error("answered %d: %s", failure.status, failure.message, exc_info=error)
    return reply(failure)


def reply(failure: Failure) -> JSONResponse:
    return JSONResponse(failure.body(), failure.status, headers=dict(failure.headers))
