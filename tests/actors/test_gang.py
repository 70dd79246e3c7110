"""Gangs of real actors on a local Ray: the same tokens for every number of ranks, clean ends."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from kdray.actors.gang import Gang
from kdray.core.request import SamplingParams
from kdray.errors import CheckpointError, ConfigError, InvalidRequest, PlacementError, RankFailed
from tests.harness import model_config, run
from tests.model import tiny

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [10] * 33]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp("wide"), "wide_tp")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, list[list[int]]]:
    """What one rank in this process says, without Ray."""
    config = model_config(folder, page_size=4, max_requests=4)
    return {
        "greedy": run(config, PROMPTS, GREEDY)[0],
        "drawn": run(config, PROMPTS, DRAWN)[0],
    }


def listen(gang: Gang) -> Any:
    """The stream of outputs of whatever is submitted from now on."""
    messages = gang.driver.outputs.options(num_returns="streaming").remote()
    assert ray.get(next(messages)) == []
    return messages


def collect(gang: Gang, sampling: SamplingParams, name: str) -> list[list[int]]:
    messages = listen(gang)
    ids = [f"{name}-{n}" for n in range(len(PROMPTS))]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        ray.get(gang.driver.submit.remote(request_id, tuple(prompt), sampling))
    gained: dict[str, list[int]] = {request_id: [] for request_id in ids}
    running = set(ids)
    for ref in messages:
        for request_id, token_ids, _, reason, _ in ray.get(ref):
            gained[request_id] += token_ids
            if reason is not None:
                running.discard(request_id)
        if not running:
            break
    return [gained[request_id] for request_id in ids]


def wait_until_gone(pids: Collection[int] = ()) -> None:
    """Every process has ended and all that ranks sit in is free again."""
    deadline = time.monotonic() + 60.0
    while any(map(alive, pids)) or in_use():
        left = [pid for pid in pids if alive(pid)]
        assert time.monotonic() < deadline, f"left behind: {left}, in use: {in_use()}"
        time.sleep(0.1)


def in_use() -> dict[str, float]:
    """What is taken of the cluster; memory for objects aside, which comes back when Ray likes."""
    total, free = ray.cluster_resources(), ray.available_resources()
    del total["object_store_memory"]
    return {kind: amount for kind, amount in total.items() if free.get(kind, 0.0) != amount}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone, or gone between opening and reading
        return False
    return state != "Z"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_any_number_of_ranks_gives_the_same_tokens(
    folder: Path, one_rank: dict[str, list[list[int]]], tp: int
) -> None:
    gang = Gang.start(model_config(folder, page_size=4, max_requests=4, tp=tp))
    try:
        assert collect(gang, GREEDY, "greedy") == one_rank["greedy"]
        assert collect(gang, DRAWN, "drawn") == one_rank["drawn"]
        stats = ray.get(gang.driver.stats.remote())
        assert stats["pages_used"] == 0 and stats["generated_tokens"] == 72
    finally:
        gang.stop()
    wait_until_gone(gang.pids.values())


def test_a_rank_is_as_urgent_as_the_job_that_starts_it() -> None:
    """Ray's own wish is that its workers wait for every other process."""
    niceness = ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()
    assert ray.get(niceness) == os.nice(0)


def start_fails(folder: Path, **wishes: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        Gang.start(model_config(folder, **wishes))
    wait_until_gone()
    return caught.value


def test_a_broken_folder_names_its_cause_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tiny.save_plain(tmp_path, "kimi")
    [weights] = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    error = start_fails(broken)
    assert isinstance(error, CheckpointError) and weights.name in str(error)


def test_ranks_that_do_not_divide_the_heads_are_refused(folder: Path) -> None:
    error = start_fails(folder, tp=3)
    assert isinstance(error, ConfigError) and "3" in str(error)


def test_a_gang_that_does_not_fit_says_what_there_is(folder: Path) -> None:
    error = start_fails(folder, tp=1024)  # more than any machine has cores
    assert isinstance(error, PlacementError)
    assert "1024 ranks" in str(error) and "CPU" in str(error) and "Lower tp" in str(error)


def test_a_gang_that_others_leave_no_room_says_so_while_it_waits(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cores = int(ray.cluster_resources()["CPU"])
    others = placement_group([{"CPU": 1}] * cores)
    assert others.wait(60)
    try:
        with pytest.raises(PlacementError, match=r"1 rank needs .*\(0 free\) after 0\.5 s"):
            Gang.start(model_config(folder, start_timeout_s=0.5))
    finally:
        remove_placement_group(others)
    [line] = [record.message for record in caplog.records if record.name == "kdray.actors.room"]
    assert "waiting up to 0.5 s" in line


def test_a_wrong_request_is_refused_to_its_caller(folder: Path) -> None:
    gang = Gang.start(model_config(folder, page_size=4, max_model_len=32))
    try:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(gang.driver.submit.remote("a", (1,) * 30, SamplingParams(max_tokens=9)))
        assert isinstance(caught.value.cause, InvalidRequest)
        assert caught.value.cause.param == "max_tokens"
    finally:
        gang.stop()


def test_broken_logits_end_their_request_alone(tmp_path: Path) -> None:
    poison, sampling = 40, replace(GREEDY, logit_bias=((40, -100.0),))  # rank 0 embeds it

    def break_token(actor: Any) -> None:
        actor._engine.driver.verifiers._verifier.model.embedding[poison] = math.nan

    config = model_config(tiny.save_plain(tmp_path, "wide_tp"), page_size=4, max_requests=4)
    expected = run(config, PROMPTS[:1], sampling)[0][0]
    gang = Gang.start(replace(config, tp=2))
    ray.get(gang.driver.__ray_call__.remote(break_token))
    rendezvous = rendezvous_of(gang)
    try:
        messages = listen(gang)
        ray.get(gang.driver.submit.remote("bad", (5, poison, 6), sampling))
        ray.get(gang.driver.submit.remote("good", tuple(PROMPTS[0]), sampling))
        gained: dict[str, list[int]] = {"bad": [], "good": []}
        ended: dict[str, tuple[str, str | None]] = {}
        while len(ended) < 2:
            for request_id, tokens, _, reason, error in ray.get(next(messages)):
                gained[request_id] += tokens
                if reason is not None:
                    ended[request_id] = (reason, error)
    finally:
        gang.stop()
    assert gained == {"bad": [], "good": expected}
    assert ended["good"] == ("length", None)
    assert ended["bad"][0] == "error" and "request bad: no finite logit" in str(ended["bad"][1])
    wait_until_gone(gang.pids.values())
    assert not rendezvous.exists()


def rendezvous_of(gang: Gang) -> Path:
    """The folder where its ranks have met."""
    assert gang._rendezvous is not None
    folder = Path(gang._rendezvous.folder)
    assert folder.is_dir()
    return folder


@pytest.fixture
def pair(folder: Path) -> Iterator[Gang]:
    gang = Gang.start(model_config(folder, page_size=4, tp=2, step_timeout_s=20.0))
    yield gang
    rendezvous = rendezvous_of(gang)
    gang.kill()
    wait_until_gone(gang.pids.values())
    assert not rendezvous.exists()


def test_a_killed_rank_ends_the_stream_with_an_error(pair: Gang) -> None:
    messages = listen(pair)
    endless = SamplingParams(max_tokens=200, ignore_eos=True)
    ray.get(pair.driver.submit.remote("a", (5, 6, 7), endless))
    ray.get(next(messages))
    os.kill(pair.pids[1], signal.SIGKILL)
    with pytest.raises(Exception, match=r"(?i)rank|peer|connection|closed|reset"):
        for ref in messages:
            ray.get(ref)
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(pair.driver.submit.remote("b", (5,), endless))
    assert isinstance(caught.value.cause, RankFailed)
