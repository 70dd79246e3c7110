"""Every error as OpenAI shapes it: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kdray.errors import EngineClosed, GangError, InvalidRequest

UNAVAILABLE = "engine_unavailable"
INVALID = "invalid_request_error"
BUSY = "rate_limit_error"
SERVER = "server_error"

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One error as the client will read it."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_news(self) -> bool:
        """Whether each one is worth a line in the log: a fault of ours, but not that there is no
        engine; who lost it logs that once, with the cause."""
        return self.status >= 500 and self.code != UNAVAILABLE

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class Refused(Exception):
    """A request turned away by the surface itself, with the failure it will be answered with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientLeft(Exception):
    """The client closed its connection before the answer was whole; nobody reads an answer."""


class GenerationFailed(Exception):
    """The engine gave up on a request it had accepted."""


def model_not_found(asked: str, served: str) -> Refused:
    message = f"the model {asked!r} does not exist; this server has {served!r}"
    return Refused(Failure(status=404, message=message, param="model", code="model_not_found"))


def body_too_large(limit: int) -> Refused:
    message = f"the body is larger than {limit} bytes"
    # The rest of the body stays unread, so the connection cannot be used again.
    headers = {"Connection": "close"}
    return Refused(Failure(status=413, message=message, code="request_too_large", headers=headers))


def unavailable(cause: str) -> Refused:
    return Refused(_unavailable(cause))


def failure_of(error: Exception) -> Failure:
    """How an exception is answered; one that nobody foresaw keeps its details to the log."""
    match error:
        case Refused():
            return error.failure
        case InvalidRequest():
            return Failure(status=400, message=str(error), param=error.param, code="invalid_value")
        case RequestValidationError():
            return Failure(status=400, message=str(error), code="invalid_value")
        case EngineClosed() | GangError():
            return _unavailable(str(error))
        case ClientLeft():
            return Failure(status=499, message="the client left", code="client_closed_request")
        case GenerationFailed():
            return Failure(status=500, message=str(error), kind=SERVER, code="generation_failed")
        case HTTPException():
            return _of_http(error)
    return Failure(
        status=500,
        message="the server failed; its log says why",
        kind=SERVER,
        code="internal_error",
    )


def _of_http(error: HTTPException) -> Failure:
    return Failure(
        status=error.status_code,
        message=str(error.detail),
        kind=INVALID if error.status_code < 500 else SERVER,
        code=_HTTP_CODES.get(error.status_code),
        headers=error.headers or {},
    )


def _unavailable(cause: str) -> Failure:
    return Failure(
        status=503,
        message=cause,
        kind=SERVER,
        code=UNAVAILABLE,
        headers={"Retry-After": "5"},
    )
