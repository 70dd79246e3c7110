"""Control routes: profiles of the running engine, under the names SGLang's and vLLM's clients use.

Bodies are SGLang's, and may be absent (vLLM's client sends a completion's). Files lie where the
server says, whatever a body wishes, and are read by their names alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from fastapi import FastAPI, Request
from starlette.responses import Response

from kdray.core.profile import ACTIVITIES, DEFAULT_STEPS, ProfileOptions
from kdray.errors import ConfigError, InvalidRequest, ProfileConflict
from kdray.serve import schema
from kdray.serve.engine import EngineClient
from kdray.serve.failure import INVALID, Failure, Refused, body_too_large
from kdray.serve.fields import Fields, parse_object
from kdray.serve.keys import KeyRing
from kdray.serve.replies import Json

MAX_BODY_BYTES = 1 << 20  # vLLM's client sends a whole prompt
# What SGLang's clients may send beside, and this server decides by itself.
_IGNORED = (
    "output_dir",
    "start_step",
    "profile_by_stage",
    "profile_stages",
    "profile_prefix",
    "profile_id",
    "merge_profiles",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Control:
    """The endpoints; each one asks for an admin key."""

    engine: EngineClient
    keys: KeyRing

    async def start_profile(self, request: Request) -> Json:
        """Record all ranks from the next step on."""
        self._check(request)
        fields = parse_object(await _body(request) or b"{}")
        options = parse_options(fields)
        try:
            status = await self.engine.profiles.start(options)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        except ProfileConflict as error:
            _conflict(error)
        ignored = [name for name in _IGNORED if fields.raw(name) is not None]
        return status | {"ignored": ignored}

    async def stop_profile(self, request: Request) -> Json:
        """End the profile and wait for its files."""
        self._check(request)
        try:
            return await self.engine.profiles.stop()
        except ProfileConflict as error:
            _conflict(error)

    async def profiles(self, request: Request) -> Json:
        """The names of all profiles, oldest first."""
        self._check(request)
        return {"object": "list", "data": await self.engine.profiles.names()}

    async def profile(self, request: Request, name: str) -> Json:
        """What became of a profile, and its files."""
        self._check(request)
        try:
            return await self.engine.profiles.status(name)
        except KeyError:
            _missing(name)

    async def profile_file(self, request: Request, name: str, file: str) -> Response:
        """One of its files."""
        self._check(request)
        try:
            content = await self.engine.profiles.read(name, file)
        except KeyError:
            _missing(f"{name}/{file}")
        kind = "text/plain; charset=utf-8" if file.endswith(".txt") else "application/octet-stream"
        if file.endswith(".json"):
            kind = "application/json"
        return Response(content, media_type=kind)

    def _check(self, request: Request) -> None:
        self.keys.check_admin(request.headers.get("authorization"))


def add_control_routes(app: FastAPI, control: Control) -> None:
    errors = schema.CONTROL_ERRORS
    for path, endpoint in (
        ("/start_profile", control.start_profile),
        ("/stop_profile", control.stop_profile),
    ):
        extra = schema.PROFILE_BODY if path == "/start_profile" else None
        app.add_api_route(path, endpoint, methods=["POST"], responses=errors, openapi_extra=extra)
    app.add_api_route("/profiles", control.profiles, responses=errors)
    app.add_api_route("/profiles/{name}", control.profile, responses=errors)
    app.add_api_route(
        "/profiles/{name}/{file}", control.profile_file, responses=errors, response_class=Response
    )


def parse_options(fields: Fields) -> ProfileOptions:
    """InvalidRequest where a member is wrong."""
    activities = fields.items("activities")
    if not all(activity in ACTIVITIES for activity in activities):
        fields.refuse("activities", f"a list of {', '.join(ACTIVITIES)}")
    try:
        return ProfileOptions(
            num_steps=fields.integer("num_steps", DEFAULT_STEPS),
            activities=frozenset(activities),  # type: ignore[arg-type]  # all of them known
            with_stack=fields.flag("with_stack", False),
            record_shapes=fields.flag("record_shapes", False),
        )
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise body_too_large(MAX_BODY_BYTES)
    return bytes(body)


def _conflict(error: ProfileConflict) -> NoReturn:
    raise Refused(
        Failure(status=409, message=str(error), kind=INVALID, code="profile_conflict")
    ) from None


def _missing(name: str) -> NoReturn:
    raise Refused(
        Failure(status=404, message=f"there is no {name!r} here", kind=INVALID, code="not_found")
    ) from None
