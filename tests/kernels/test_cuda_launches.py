"""What the launchers of acceptance and commit ask of the device, seen without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kdray.core.plan import AcceptedPaths, DraftTrees
from kdray.kernels import cuda_commit
from kdray.kernels.cuda_accept import accept_paths
from kdray.kernels.cuda_commit import (
    CacheTable,
    PathBlock,
    SlotState,
    commit_kv,
    commit_paths,
)
from kdray.kernels.loader import KernelLoader

MAX_ROWS = 4096


@dataclass
class Launch:
    """One kernel call, its grid and block as three numbers each."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Any, ...]


@dataclass
class RecordingLoader:
    """A loader whose kernels only write down how they were launched."""

    launches: list[Launch] = field(default_factory=list)

    def get(self, name: str, entry: str, defines: object = None) -> RecordingKernel:
        return RecordingKernel(entry, self.launches)


@dataclass
class RecordingKernel:
    entry: str
    launches: list[Launch]

    def launch(self, grid: Any, block: Any, args: tuple[Any, ...], **settings: int) -> None:
        self.launches.append(Launch(self.entry, three(grid), three(block), args))


def three(extent: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = (extent,) if isinstance(extent, int) else extent
    return cast("tuple[int, int, int]", (*sizes, *[1] * (3 - len(sizes))))


def recorded(call: Any, *args: Any) -> list[Launch]:
    loader = RecordingLoader()
    call(cast("KernelLoader", loader), *args)
    return loader.launches


@given(moves=st.integers(1, MAX_ROWS), row_bytes=st.integers(1, 3000).map(lambda n: 4 * n))
def test_a_block_of_commit_kv_holds_all_rows_of_its_columns(moves: int, row_bytes: int) -> None:
    table = CacheTable.of([torch.zeros(2, row_bytes // 4), torch.zeros(2, 5)])
    slots = torch.zeros(moves, dtype=torch.int64)
    (launch,) = recorded(commit_kv, table, slots, slots)
    wide, deep, _ = launch.block
    assert wide * deep <= cuda_commit.MAX_THREADS
    assert deep * cuda_commit.LIST_ROWS >= moves
    assert launch.grid == (-(-table.columns // wide), 1, 2)


@given(
    width=st.integers(2, 1 + cuda_commit.MAX_MOVES),
    requests=st.integers(1, 70),
    row_bytes=st.integers(1, 3000).map(lambda n: 4 * n),
    shape=st.builds(
        PathBlock,
        rows=st.sampled_from([1, 2, 4, 8]),
        columns=st.integers(1, 256),
        caches=st.integers(1, 4),
    ),
)
def test_a_block_of_commit_paths_holds_a_path(
    width: int, requests: int, row_bytes: int, shape: PathBlock
) -> None:
    table = CacheTable.of([torch.zeros(2, row_bytes // 4)] * 3)
    numbers = torch.zeros(requests, width, dtype=torch.int32)
    paths = AcceptedPaths(node=numbers, length=numbers[:, 0].clone(), bonus=numbers[:, 0])
    (launch,) = recorded(commit_paths, table, paths, some_state(), None, shape)
    wide, deep, _ = launch.block
    assert width - 1 <= wide * deep <= cuda_commit.MAX_THREADS
    assert deep * shape.rows >= width - 1
    assert launch.grid == (-(-table.columns // wide), requests, -(-3 // shape.caches))


def some_state() -> SlotState:
    return SlotState(
        root=torch.zeros(4, dtype=torch.int32),
        root_position=torch.zeros(4, dtype=torch.int32),
        page_table=torch.zeros(4, 2, dtype=torch.int32),
        page_size=16,
    )


@pytest.mark.parametrize(
    ("nodes", "threads"), [(1, 32), (2, 32), (33, 32), (34, 64), (1024, 1024), (1025, 1024)]
)
def test_accept_path_has_a_thread_for_every_draft(nodes: int, threads: int) -> None:
    trees = some_trees(3, nodes)
    (launch,) = recorded(accept_paths, trees, trees.token, 7)
    assert launch.block == (threads, 1, 1) and launch.grid == (3, 1, 1)


def some_trees(requests: int, nodes: int) -> DraftTrees:
    column = torch.zeros(requests, nodes, dtype=torch.int32)
    return DraftTrees(
        token=column,
        parent=column,
        depth=column,
        score=column,
        mask=column[..., None],
        num_nodes=torch.ones(requests, dtype=torch.int32),
    )


def test_nothing_to_do_launches_nothing() -> None:
    table, none = CacheTable.of([torch.zeros(2, 4)]), torch.zeros(0, dtype=torch.int64)
    assert recorded(commit_kv, table, none, none) == []
    roots = torch.zeros(3, 1, dtype=torch.int32)
    alone = AcceptedPaths(node=roots, length=roots[:, 0] + 1, bonus=roots[:, 0])
    assert recorded(commit_paths, table, alone, some_state()) == []
    trees = some_trees(0, 5)
    assert recorded(accept_paths, trees, trees.token, 7) == []


def test_a_table_says_where_rows_lie_and_how_wide_they_are() -> None:
    aligned, narrow = torch.zeros(7, 576, dtype=torch.bfloat16), torch.zeros(6, 3)
    shifted = torch.zeros(4 * 8 + 1)[1:].view(4, 8)
    table = CacheTable.of([aligned, narrow])
    assert table.entries.tolist() == [[aligned.data_ptr(), 1152, 7], [narrow.data_ptr(), 12, 6]]
    assert table.columns == 72  # vectors of 16 bytes
    assert CacheTable.of([shifted]).columns == 8  # words of 4: the address is no multiple of 16


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 8).T, torch.zeros(4, 0)],
    ids=["odd rows", "a view", "no bytes"],
)
def test_a_table_refuses_what_no_kernel_can_move(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"cache 1 .* must be contiguous, with rows of a multiple"):
        CacheTable.of([torch.zeros(2, 4), cache])
    with pytest.raises(ValueError, match="at least one cache"):
        CacheTable.of([])


def test_limits_are_refused_with_their_numbers() -> None:
    table, many = CacheTable.of([torch.zeros(2, 4)]), torch.zeros(4097, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 4096 rows at once, not 4097"):
        recorded(commit_kv, table, many, many)
    deep = torch.zeros(1, 66, dtype=torch.int32)
    paths = AcceptedPaths(node=deep, length=deep[:, 0].clone(), bonus=deep[:, 0])
    with pytest.raises(ValueError, match="at most 64 drafts, not 65"):
        recorded(commit_paths, table, paths, some_state())
    trees = some_trees(1, 1026)
    with pytest.raises(ValueError, match="1 to 1025 nodes, not 1026"):
        recorded(accept_paths, trees, trees.token, 7)
    with pytest.raises(ValueError, match="cannot be -1 drafts deep"):
        recorded(accept_paths, some_trees(1, 2), some_trees(1, 2).token, -1)
