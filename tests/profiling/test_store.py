"""Profiles lie in a folder of their user's own, and names lead nowhere else."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kdray.core.profile import ProfileOptions, ProfileOrder
from kdray.errors import ConfigError
from kdray.profiling.store import ProfileStore
from kdray.verifier.wire import Kind, StepHeader, decode, encode


def test_profiles_have_folders_that_nobody_else_enters(tmp_path: Path) -> None:
    store = ProfileStore.at(str(tmp_path / "profiles"))
    assert store.names() == []
    names = [store.create(), store.create()]
    assert store.names() == sorted(names) and len(set(names)) == 2
    for folder in (store.root, store.folder(names[0])):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["..", ".", "", "/", "/etc", "../secret", "a/../b", "%2e%2e"])
def test_no_path_is_followed(tmp_path: Path, name: str) -> None:
    store = ProfileStore(tmp_path / "profiles")
    own = store.create()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("k")
    with pytest.raises(KeyError):
        store.read(name, "key")
    with pytest.raises(KeyError):
        store.read(own, f"{name}/secret/key")


def test_links_are_no_files(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles")
    name = store.create()
    (tmp_path / "secret").write_text("k")
    (store.folder(name) / "link").symlink_to(tmp_path / "secret")
    (store.root / "other").symlink_to(tmp_path)
    assert store.files(name) == {} and store.names() == [name]
    with pytest.raises(KeyError):
        store.read(name, "link")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "planted").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="--profile-folder"):
        ProfileStore(tmp_path / "planted").create()


def test_an_order_survives_the_wire() -> None:
    options = ProfileOptions(activities=frozenset({"CPU", "MEM"}), record_shapes=True)
    for folder in ("/tmp/p", "/tmp/é", "/tmp/four"):
        order = ProfileOrder(options=options, folder=folder)
        header = decode(encode(StepHeader(kind=Kind.PROFILE, plan=None, profile=order)))
        assert header.profile is not None
        assert (header.profile.flags, header.profile.folder) == (order.flags, folder)
    assert decode(encode(StepHeader(kind=Kind.PROFILE_END, plan=None))).kind is Kind.PROFILE_END


def test_a_header_cut_short_is_refused() -> None:
    order = ProfileOrder(options=ProfileOptions(), folder="/tmp/profile")
    message = encode(StepHeader(kind=Kind.PROFILE, plan=None, profile=order))
    with pytest.raises(ValueError, match="wrong length"):
        decode(message[:-8])


def test_activities_are_those_the_ranks_can_record() -> None:
    def resolve(*asked: str, on_gpu: bool = True, under_nsight: bool = False) -> set[str]:
        options = ProfileOptions(activities=frozenset(asked))  # type: ignore[arg-type]
        return set(options.resolved(on_gpu=on_gpu, under_nsight=under_nsight).activities)

    assert resolve() == {"CPU", "GPU"}
    assert resolve(on_gpu=False) == {"CPU"}
    assert resolve(under_nsight=True) == {"CUDA_PROFILER"}
    for wrong in ({"on_gpu": False}, {"under_nsight": True}):
        with pytest.raises(ConfigError):
            resolve("GPU", **wrong)
    with pytest.raises(ConfigError, match="--nsight"):
        resolve(on_gpu=False, under_nsight=True)
    with pytest.raises(ConfigError, match="alone"):
        resolve("GPU", "CUDA_PROFILER")
    with pytest.raises(ConfigError, match="num_steps"):
        ProfileOptions(num_steps=0)
