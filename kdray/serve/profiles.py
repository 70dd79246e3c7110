"""Profiles of a driver actor, as the control routes ask for them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from kdray.core.profile import ProfileOptions
from kdray.errors import EngineClosed


class DriverProfiles:
    """kdray.serve.engine.ProfileControl over one driver actor."""

    def __init__(self, driver: ActorHandle[Any]) -> None:
        self._driver = driver

    async def start(self, options: ProfileOptions) -> dict[str, Any]:
        return await _result(self._driver.start_profile.remote(options))  # type: ignore[no-any-return]

    async def stop(self) -> dict[str, Any]:
        return await _result(self._driver.stop_profile.remote())  # type: ignore[no-any-return]

    async def names(self) -> list[str]:
        return await _result(self._driver.profiles.remote())  # type: ignore[no-any-return]

    async def status(self, name: str) -> dict[str, Any]:
        return await _result(self._driver.profile_status.remote(name))  # type: ignore[no-any-return]

    async def read(self, name: str, file: str) -> bytes:
        return await _result(self._driver.profile_file.remote(name, file))  # type: ignore[no-any-return]


async def _result(call: Awaitable[Any]) -> Any:
    """A remote call's result, or the exception that it raised there itself."""
    try:
        return await call
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError:
        raise EngineClosed("the driver actor died; the supervisor's log says why") from None
