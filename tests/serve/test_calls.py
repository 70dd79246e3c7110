"""A call made apart outlives the Ray task that made it: Ray cancels only the others with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError, TaskCancelledError

from kdray.serve.calls import call_apart
from tests.serve.http import wait_until


class Held:
    """Calls that last until they are let go, and what became of each."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._fates: dict[str, str] = {}

    async def hold(self, name: str) -> None:
        self._fates[name] = "held"
        try:
            await self._free.wait()
            self._fates[name] = "ended"
        except asyncio.CancelledError:
            self._fates[name] = "cancelled"
            raise

    async def let_go(self) -> None:
        self._free.set()

    async def fates(self) -> dict[str, str]:
        return self._fates


class Caller:
    async def call(self, held: Any) -> None:
        """Two calls of either kind, the plain ones around the others, so that what tells that Ray
        has seen to all of them comes last whichever way round it goes."""
        calls = [held.hold.remote("plain, first")]
        calls += [call_apart(held.hold, name) for name in ("apart, one", "apart, two")]
        calls += [held.hold.remote("plain, last")]
        await asyncio.gather(*calls)


@pytest.fixture
def held(ray_cluster: None) -> Any:
    return ray.remote(Held).options(num_cpus=0).remote()


def test_ray_cancels_what_a_task_called_save_what_it_called_apart(held: Any) -> None:
    def fates() -> dict[str, str]:
        return ray.get(held.fates.remote())  # type: ignore[no-any-return]

    caller: Any = ray.remote(Caller).options(num_cpus=0).remote()
    call = caller.call.remote(held)
    wait_until(lambda: len(fates()) == 4)
    ray.cancel(call)
    with pytest.raises((TaskCancelledError, RayTaskError)):
        ray.get(call)
    wait_until(lambda: {fates()[f"plain, {which}"] for which in ("first", "last")} == {"cancelled"})
    ray.get(held.let_go.remote())
    wait_until(lambda: "held" not in fates().values())
    assert {name for name, fate in fates().items() if fate == "ended"} == {
        "apart, one",
        "apart, two",
    }
