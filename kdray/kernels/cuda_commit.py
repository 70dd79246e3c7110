"""commit_kv.cu: accepted rows to their place, in all caches by one launch.

commit_kv is the contract of Ops, over lists of slots. commit_paths and advance_requests do the same
work from what the device knows, for rounds captured as graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths
from kdray.kernels.checks import check
from kdray.kernels.loader import KernelLoader
from kdray.kernels.round_ops import SlotState

# As in commit_kv.cu.
LIST_ROWS = 8  # rows a thread of commit_kv holds
PATH_ROWS = 8  # and of commit_paths, unless it is compiled for another number
MAX_THREADS = 512
MAX_MOVES = 64

MAX_ROWS = LIST_ROWS * MAX_THREADS
WIDE, NARROW = 16, 4  # bytes a thread copies at a time
LIST_COLUMNS = 64  # columns a block of commit_kv takes at most
REQUESTS_PER_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PathBlock:
    """How much of a request's path a block of commit_paths moves.

    rows      a thread holds, all in flight at once
    columns   at most, of 16 bytes
    caches    one after another; the same of every cache
    """

    rows: int = PATH_ROWS
    columns: int = 128
    caches: int = 1

    @classmethod
    def of(cls, requests: int) -> PathBlock:
        """Measured on an H200, 61 caches: many requests fill it even with half the blocks."""
        return cls(caches=2 if requests >= 32 else 1)


@dataclass(frozen=True, slots=True, eq=False)
class CacheTable:
    """The caches [S, ..] of one device as kernels find them. Make it once, before any capture, and
    keep the caches as long as it is used.

    entries   [G, 3] int64 on the device: address, bytes a row, rows
    columns   of the widest row: vectors of 16 bytes, or of 4 where 16 do not fit
    """

    entries: Tensor
    columns: int

    @classmethod
    def of(cls, caches: Sequence[Tensor]) -> CacheTable:
        """Raises ValueError where a cache cannot be moved by the kernels (see `movable`)."""
        if not caches:
            raise ValueError("a table needs at least one cache")
        for i, cache in enumerate(caches):
            if not movable(cache):
                raise ValueError(
                    f"cache {i} ({list(cache.shape)}, {cache.dtype}) must be contiguous, with rows "
                    f"of a multiple of {NARROW} bytes"
                )
        entries = [(cache.data_ptr(), row_bytes(cache), len(cache)) for cache in caches]
        return cls(
            entries=torch.tensor(entries, dtype=torch.int64, device=caches[0].device),
            columns=max(_columns(address, size) for address, size, _ in entries),
        )

    def __len__(self) -> int:
        return len(self.entries)


def movable(cache: Tensor) -> bool:
    """Whether the kernels can move rows of this cache."""
    size = row_bytes(cache)
    aligned = (cache.data_ptr() | size) % NARROW == 0
    return cache.is_contiguous() and size > 0 and aligned and len(cache) < 2**31


def row_bytes(cache: Tensor) -> int:
    """Of a cache with rows; 0 for one without."""
    return cache.numel() // max(1, len(cache)) * cache.element_size()


@check(table={"entries": "G 3 int64"}, source="M int64", target="M int64")
def commit_kv(loader: KernelLoader, table: CacheTable, source: Tensor, target: Tensor) -> None:
    """Copy rows source [M] -> target [M] in every cache; all are read before any is written.

    Targets are distinct. Rows no cache has are left out. Raises ValueError where M > 4096.
    """
    moves = len(source)
    if moves > MAX_ROWS:
        raise ValueError(f"commit_kv moves at most {MAX_ROWS} rows at once, not {moves}")
    if moves == 0:
        return
    deep = -(-moves // LIST_ROWS)
    # A block holds all rows, so many rows leave it few columns; a power of two keeps lines whole.
    wide = 1 << (min(MAX_THREADS // deep, table.columns, LIST_COLUMNS).bit_length() - 1)
    grid = (-(-table.columns // wide), 1, len(table))
    kernel = loader.get("commit_kv", "commit_kv")
    kernel.launch(grid, (wide, deep), (table.entries, source, target, moves), overlap=True)


@check(
    table={"entries": "G 3 int64"},
    paths={"node": "R D int32", "length": "R int32"},
    state={"root_position": "S int32", "page_table": "S P int32"},
    slot="? R int32",
)
def commit_paths(
    loader: KernelLoader,
    table: CacheTable,
    paths: AcceptedPaths,
    state: SlotState,
    slot: Tensor | None = None,
    shape: PathBlock | None = None,
) -> None:
    """Make the KV of every accepted node contiguous behind its root, in all caches.

    slot   [R]: the slot of each row of the batch, outside 0 .. S - 1 for padding; None: r itself.

    Rows laid out otherwise move too, if a page table says where they are: features [R * N, F] are a
    cache whose page r holds the N rows of request r, with roots at position 0.
    """
    requests, width = paths.node.shape
    if width - 1 > MAX_MOVES:
        raise ValueError(f"commit_paths takes paths of at most {MAX_MOVES} drafts, not {width - 1}")
    if requests == 0 or width == 1:
        return
    shape = shape or PathBlock.of(requests)
    slots, pages = state.page_table.shape
    deep = -(-(width - 1) // shape.rows)
    # At least a thread a path node; beyond the widest row threads would idle.
    wide = max(shape.rows, min(MAX_THREADS // deep, table.columns, shape.columns))
    grid = (-(-table.columns // wide), requests, -(-len(table) // shape.caches))
    where = (paths.node, paths.length, state.root_position, state.page_table, slot)
    kernel = loader.get("commit_kv", "commit_paths", path_defines(shape))
    kernel.launch(
        grid,
        (wide, deep),
        (table.entries, *where, width, slots, pages, state.page_size, len(table)),
        overlap=True,
    )


@check(
    paths={"length": "R int32", "bonus": "R int32"},
    state={"root": "S int32", "root_position": "S int32"},
    slot="? R int32",
)
def advance_requests(
    loader: KernelLoader, paths: AcceptedPaths, state: SlotState, slot: Tensor | None = None
) -> None:
    """The next step's roots: the bonus token, as far behind the old root as the path is long.

    slot   as in commit_paths, which must come before.
    """
    requests = len(paths.length)
    if requests == 0:
        return
    grid = -(-requests // REQUESTS_PER_BLOCK)
    args = (state.root_position, state.root, paths.length, paths.bonus, slot)
    kernel = loader.get("commit_kv", "advance_requests")
    kernel.launch(grid, REQUESTS_PER_BLOCK, (*args, requests, len(state.root)), overlap=True)


def path_defines(shape: PathBlock) -> dict[str, int]:
    """What commit_kv.cu is compiled with: nothing, where the shape is its own."""
    return {} if shape.rows == PATH_ROWS else {"PATH_ROWS": shape.rows}


def _columns(address: int, size: int) -> int:
    """Vectors in a row of `size` bytes, as the kernel will choose them."""
    return size // (WIDE if (address | size) % WIDE == 0 else NARROW)
