"""build_tree.cu: a batch of draft trees, by the design that is fastest for their size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.tree import WORD_BITS
from kdray.errors import KernelError
from kdray.kernels.checks import check
from kdray.kernels.loader import Kernel, KernelLoader

MAX_DEPTH = 15
MAX_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeDesign:
    """One way to build: an entry point and how it is launched.

    max_budget     draft nodes a tree may have
    threads        a block; one block a request
    shared_bytes   dynamic shared memory a block
    defines        compile-time choices as (name, value)
    """

    entry: str
    max_budget: int
    threads: int
    shared_bytes: int = 0
    defines: tuple[tuple[str, int], ...] = ()


POP_32 = TreeDesign(entry="build_tree_pop_32", max_budget=32, threads=128)
POP_64 = TreeDesign(entry="build_tree_pop_64", max_budget=64, threads=128)
POP_128 = TreeDesign(entry="build_tree_pop_128", max_budget=128, threads=128)
THRESHOLD_256 = TreeDesign(
    entry="build_tree_threshold_256", max_budget=256, threads=512, shared_bytes=82 * 1024
)
THRESHOLD_1024 = TreeDesign(
    entry="build_tree_threshold_1024", max_budget=1024, threads=512, shared_bytes=98 * 1024
)
DESIGNS = (POP_32, POP_64, POP_128, THRESHOLD_256, THRESHOLD_1024)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltTrees:
    """Draft trees with what only some engines want; None where it was not asked for.

    position       [R, N] int32: the root's position plus the node's depth; padding as the root
    first_child    [R, N] int32: -1 where there is none
    next_sibling   [R, N] int32: -1 where there is none; siblings stand in ascending node number
    """

    trees: DraftTrees
    position: Tensor | None = None
    first_child: Tensor | None = None
    next_sibling: Tensor | None = None


def choose_design(max_budget: int) -> TreeDesign:
    """The fastest design that builds trees of so many draft nodes."""
    for design in DESIGNS:
        if max_budget <= design.max_budget:
            return design
    raise ValueError(f"a draft tree has at most {DESIGNS[-1].max_budget} nodes, not {max_budget}")


def tree_kernel(loader: KernelLoader, design: TreeDesign) -> Kernel:
    return loader.get("build_tree", design.entry, dict(design.defines))


def empty_trees(
    requests: int,
    num_nodes: int,
    device: torch.device,
    *,
    position: bool = False,
    links: bool = False,
) -> BuiltTrees:
    """Buffers for trees of `num_nodes` nodes, root counted; a graph keeps writing to the same."""

    def column() -> Tensor:
        return torch.empty(requests, num_nodes, dtype=torch.int32, device=device)

    words = -(-num_nodes // WORD_BITS)
    trees = DraftTrees(
        token=column(),
        parent=column(),
        depth=column(),
        score=column(),
        mask=torch.empty(requests, num_nodes, words, dtype=torch.int32, device=device),
        num_nodes=torch.empty(requests, dtype=torch.int32, device=device),
    )
    return BuiltTrees(
        trees=trees,
        position=column() if position else None,
        first_child=column() if links else None,
        next_sibling=column() if links else None,
    )


def build_trees(
    loader: KernelLoader,
    candidates: Candidates,
    roots: Tensor,
    budgets: Tensor,
    max_budget: int,
    *,
    base: Tensor | None = None,
    position: bool = False,
    links: bool = False,
) -> BuiltTrees:
    """Best-first trees of 1 + max_budget nodes in new buffers; else as build_trees_into."""
    out = empty_trees(
        len(roots), 1 + max_budget, candidates.score.device, position=position, links=links
    )
    build_trees_into(loader, out, candidates, roots, budgets, base=base)
    return out


@check(
    out={
        "trees.token": "R N int32",
        "trees.parent": "R N int32",
        "trees.depth": "R N int32",
        "trees.score": "R N int32",
        "trees.mask": "R N W int32",
        "trees.num_nodes": "R int32",
        "position": "? R N int32",
        "first_child": "? R N int32",
        "next_sibling": "? R N int32",
    },
    candidates={"token": "R L K int32", "score": "R L K int32"},
    roots="R int32",
    budgets="R int32",
    base="? R int32",
)
def build_trees_into(
    loader: KernelLoader,
    out: BuiltTrees,
    candidates: Candidates,
    roots: Tensor,
    budgets: Tensor,
    *,
    base: Tensor | None = None,
    design: TreeDesign | None = None,
) -> None:
    """Build every request's tree (core.tree.build_tree) into `out`; may be captured in a graph.

    candidates   [R, L, K], L <= 15, K <= 64; rows by score descending, absent ones last
    roots        [R] int32 tokens
    budgets      [R] int32 draft nodes wanted, read on the device and cut to 0 .. N - 1
    base         [R] int32 absolute position of each root, read on the device; None: 0

    Raises ValueError where a size is beyond these or beyond the design's.
    """
    requests, depth, width = candidates.score.shape
    num_nodes, words = out.trees.mask.shape[1:]
    design = design or choose_design(num_nodes - 1)
    _check_sizes(depth, width, num_nodes, words, design)
    if requests == 0:
        return
    trees = out.trees
    columns = (trees.token, trees.parent, trees.depth, trees.score)
    links = (out.first_child, out.next_sibling)
    outputs = (*columns, out.position, trees.mask, trees.num_nodes, *links)
    inputs = (candidates.token, candidates.score, roots, base, budgets)
    tree_kernel(loader, design).launch(
        requests,
        design.threads,
        (*outputs, *inputs, depth, width, num_nodes),
        shared_bytes=design.shared_bytes,
        overlap=True,
    )


def _check_sizes(depth: int, width: int, num_nodes: int, words: int, design: TreeDesign) -> None:
    if depth > MAX_DEPTH or width > MAX_WIDTH:
        raise ValueError(
            f"candidates may have {MAX_DEPTH} depths of {MAX_WIDTH}, got {depth} of {width}; "
            "keep the best of each row and cut the depths"
        )
    if not 1 <= num_nodes <= 1 + design.max_budget:
        raise ValueError(
            f"{design.entry} builds trees of 1 to {1 + design.max_budget} nodes, not {num_nodes}"
        )
    if words != -(-num_nodes // WORD_BITS):
        raise KernelError(f"mask has {words} words a row, {num_nodes} nodes take another number")
