"""A profile of two real ranks: the same steps on both, one file that Perfetto's importer takes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from kdray.actors.gang import Gang
from kdray.core.profile import ProfileOptions
from kdray.core.request import SamplingParams
from kdray.errors import ConfigError, ProfileConflict
from kdray.profiling.check import problems
from kdray.profiling.merge import DRIVER_PID, FIRST_RANK_PID
from kdray.serve.profiles import DriverProfiles
from tests.actors.test_gang import listen
from tests.harness import model_config
from tests.model import tiny

STEPS = 4
pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[Gang]:
    folder = tiny.save_plain(tmp_path_factory.mktemp("wide"), "wide_tp")
    profiles = tmp_path_factory.mktemp("profiles")
    config = model_config(folder, page_size=4, tp=2, profile_folder=str(profiles))
    gang = Gang.start(config)
    yield gang
    gang.stop()


def generate(gang: Gang, name: str, tokens: int) -> None:
    messages = listen(gang)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ray.get(gang.driver.submit.remote(name, (5, 6, 7), sampling))
    for ref in messages:
        if any(reason for *_, reason, _ in ray.get(ref)):
            return


def start(gang: Gang, **wishes: Any) -> dict[str, Any]:
    return ray.get(gang.driver.start_profile.remote(ProfileOptions(**wishes)))  # type: ignore[no-any-return]


def stop(gang: Gang) -> dict[str, Any]:
    return ray.get(gang.driver.stop_profile.remote(), timeout=120)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def profile(gang: Gang) -> dict[str, Any]:
    """Four of more steps."""
    assert start(gang, num_steps=STEPS)["state"] == "recording"
    generate(gang, "a", tokens=10)
    return stop(gang)


@pytest.fixture(scope="module")
def merged(profile: dict[str, Any]) -> dict[str, Any]:
    with gzip.open(Path(profile["folder"]) / "merged.json.gz") as file:
        return json.load(file)  # type: ignore[no-any-return]


def names(merged: dict[str, Any], pid: int, kind: str) -> Counter[str]:
    events = merged["traceEvents"]
    return Counter(e["name"] for e in events if e["pid"] == pid and e.get("cat") == kind)


def test_it_ends_after_its_steps_with_all_files(profile: dict[str, Any]) -> None:
    assert (profile["state"], profile["steps"], profile["error"]) == ("done", STEPS, None)
    for rank in (0, 1):
        assert f"rank-{rank}.trace.json.gz" in profile["files"]
        memory = json.loads((Path(profile["folder"]) / f"rank-{rank}.memory.json").read_text())
        assert memory["begin"]["resident_bytes"] > 0 and memory["end"]["resident_bytes"] > 0


def test_all_ranks_record_the_same_steps(merged: dict[str, Any]) -> None:
    assert problems(merged) == []
    for rank in (0, 1):
        assert names(merged, FIRST_RANK_PID + rank, "user_annotation")["verify"] == STEPS
    verbs = names(merged, DRIVER_PID, "verb")
    assert {verbs[verb] for verb in ("draft", "build", "verify", "accept", "commit")} == {STEPS}
    assert names(merged, DRIVER_PID, "step") == {f"step {n}": 1 for n in range(1, STEPS + 1)}


def test_every_actor_has_a_table(profile: dict[str, Any]) -> None:
    tables = json.loads((Path(profile["folder"]) / "summary.json").read_text())
    assert set(tables) == {"rank-0", "rank-1"}
    for rows in tables.values():
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert any("mm" in row["kernel"] and row["calls"] > 0 for row in rows)


def test_files_are_handed_out_by_their_names_alone(gang: Gang, profile: dict[str, Any]) -> None:
    read = gang.driver.profile_file.remote
    assert ray.get(read(profile["id"], "summary.txt")).startswith(b"rank 0\n")
    for name, file in (
        (profile["id"], f"../{profile['id']}/summary.txt"),
        ("..", "summary.txt"),
        (profile["id"], "/etc/hostname"),
        (f"{profile['id']}/", "summary.txt"),
    ):
        with pytest.raises(KeyError):
            ray.get(read(name, file))


def test_one_at_a_time(gang: Gang, profile: dict[str, Any]) -> None:
    first = start(gang, num_steps=1000)
    with pytest.raises(ProfileConflict, match="recording"):
        start(gang)
    generate(gang, "b", tokens=5)
    ended = stop(gang)
    assert (ended["id"], ended["state"]) == (first["id"], "done")
    assert 0 < ended["steps"] < 1000
    assert stop(gang) == ended
    assert ray.get(gang.driver.profiles.remote()) == sorted([profile["id"], first["id"]])


def test_what_a_cpu_cannot_record_is_refused(gang: Gang) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        start(gang, activities=frozenset({"GPU"}))


def test_the_endpoint_s_way_to_them(gang: Gang, profile: dict[str, Any]) -> None:
    """Errors of the driver's process arrive as themselves."""

    async def ask() -> None:
        profiles = DriverProfiles(gang.driver)
        assert profile["id"] in await profiles.names()
        assert (await profiles.status(profile["id"]))["state"] == "done"
        assert (await profiles.read(profile["id"], "summary.txt")).startswith(b"rank 0\n")
        for missing in (profiles.status("nothing"), profiles.read(profile["id"], "nothing")):
            with pytest.raises(KeyError):
                await missing
        with pytest.raises(ConfigError, match="no GPU"):
            await profiles.start(ProfileOptions(activities=frozenset({"GPU"})))
        await profiles.start(ProfileOptions(num_steps=1))
        with pytest.raises(ProfileConflict):
            await profiles.start(ProfileOptions())
        assert (await profiles.stop())["steps"] == 0

    asyncio.run(ask())
