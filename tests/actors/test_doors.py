"""What passes between processes: no pickles but Ray's own, sockets in a folder of the user's."""

from __future__ import annotations

import ast
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdray.actors.nsight import NSIGHT_OPTIONS
from kdray.actors.placement import Placement
from kdray.actors.rendezvous import Rendezvous, make_folder, remove_folder
from kdray.actors.room import Room
from kdray.config import EngineConfig

KDRAY = Path(__file__).resolve().parents[2] / "kdray"
# Whatever turns bytes of somebody else's into objects by running what they say.
UNPICKLING = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object",
         "gather_object", "scatter_object_list", "recv_object_list", "eval", "exec"}  # fmt: skip


def names_used(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                yield from (alias.name.partition(".")[0] for alias in node.names)
            case ast.ImportFrom():
                yield (node.module or "").partition(".")[0]
            case ast.Call(func=ast.Attribute(attr=name)):
                yield name
            case ast.Call(func=ast.Name(id=name)):
                yield name


def test_the_check_sees_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import pickle\nfrom dill import x\nsocket.recv_pyobj()\neval('1')\n")
    assert {"pickle", "dill", "recv_pyobj", "eval"} <= set(names_used(file))


def test_nothing_is_unpickled() -> None:
    for path in KDRAY.rglob("*.py"):
        found = set(names_used(path)) & (UNPICKLING | CALLS)
        if path.is_relative_to(KDRAY / "demo"):
            found -= {"eval", "exec"}  # of its own text, when the demo model is made and measured
        assert not found, f"{path}: {found}"


def test_sockets_lie_where_only_this_user_can_enter() -> None:
    folder = make_folder()
    try:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        rendezvous = Rendezvous(host="127.0.0.1", port=1, folder=folder)
        assert rendezvous.endpoint(7) == f"ipc://{folder}/rank-7"
        assert rendezvous.heartbeat(7).startswith(f"{folder}/")
    finally:
        remove_folder(folder)


@pytest.mark.parametrize("nsight", [False, True])
def test_nsight_wraps_the_ranks_that_ask_for_it(nsight: bool) -> None:
    config = EngineConfig(device="cuda", nsight=nsight)
    options = Room(group=None).options(config, Placement(), 0)  # type: ignore[arg-type]
    assert options["runtime_env"].get("nsight") == (NSIGHT_OPTIONS if nsight else None)
    if nsight:  # each rank gets a copy: Ray writes the output's place into it
        assert options["runtime_env"]["nsight"] is not NSIGHT_OPTIONS
    assert NSIGHT_OPTIONS["cuda-graph-trace"] == "node"
    assert NSIGHT_OPTIONS["capture-range"] == "cudaProfilerApi"
