"""Draft trees for an SGLang that has DDTree: its builder's contract, by kdray's ops.

SGLang's DDTree branches build a tree with a heap on the CPU, one request at a time. `patch` puts
the builder below in its place; it takes CPU tensors and CUDA tensors alike, a batch at once too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdray.core.plan import Candidates, DraftTrees
from kdray.core.tree import ABSENT, FRACTION_BITS, MIN_LOGPROB, mask_to_bool
from kdray.errors import ConfigError
from kdray.kernels.ops import Ops, load_ops

BUILDER = "build_ddtree_tree_from_topk"
PARAMETERS = ["top_log_probs", "top_token_ids", "budget"]
MODULES = (
    "sglang.srt.speculative.dflash_ddtree_utils",
    "sglang.srt.speculative.ddtree_utils",
)


class SglangTree(NamedTuple):
    """One tree as SGLang's DDTree worker takes it; n drafts, on the CPU. Node 0 is the root.

    node_token_ids, node_depths   [n] int64, of nodes 1 .. n
    parents                       n + 1 node numbers, the root's is -1
    child_maps                    n + 1 dicts: a child's token -> its node number
    visibility                    [n + 1, n + 1] bool: row i sees its ancestors and itself
    retrieve_next_token           [n + 1] int64: first child, or -1
    retrieve_next_sibling         [n + 1] int64: next child of the same parent, or -1
    """

    node_token_ids: Tensor
    node_depths: Tensor
    parents: list[int]
    child_maps: list[dict[int, int]]
    visibility: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


def build_ddtree_tree_from_topk(
    top_log_probs: Tensor, top_token_ids: Tensor, budget: int, workspace: object = None
) -> SglangTree:
    """The best `budget` prefixes of one request's rows [L, K] (best first), as SGLang wants them.

    workspace is SGLang's own scratch memory; nothing here needs it.
    """
    batch = build_ddtree_trees_from_topk(top_log_probs[None], top_token_ids[None], [budget])
    return batch[0]


def build_ddtree_trees_from_topk(
    top_log_probs: Tensor, top_token_ids: Tensor, budgets: Sequence[int]
) -> list[SglangTree]:
    """The same for R requests [R, L, K] with a budget each: one build, one copy to the host.

    Away from ties the trees equal SGLang's. Of equal scores the shallower node comes first, then
    the lower parent (core.tree). NaN and -inf are no candidates.
    """
    if top_log_probs.dim() != 3 or top_log_probs.shape != top_token_ids.shape:
        raise ValueError(
            "log-probs and token ids must both be [R, L, K], got "
            f"{list(top_log_probs.shape)} and {list(top_token_ids.shape)}"
        )
    wishes = [max(0, int(budget)) for budget in budgets]
    useful = max([0, *wishes])  # no node within the budget has a rank beyond it
    candidates = Candidates(
        token=top_token_ids[..., :useful].int().contiguous(),
        score=_quantise(top_log_probs[..., :useful]),
    )
    device = top_log_probs.device
    roots = torch.zeros(len(wishes), dtype=torch.int32, device=device)
    trees = _ops(device).build_trees(candidates, roots, wishes)
    return _on_host(trees)


def patch() -> Callable[[], None]:
    """Put the builder above into the installed SGLang; returns what takes it out again.

    Every loaded module of SGLang that has imported the builder by name gets the new one as well.
    Raises ConfigError where SGLang is not installed, or has no DDTree of this contract.
    """
    original = vars(_ddtree_module())[BUILDER]
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and vars(module).get(BUILDER) is original
    ]

    def put(builder: Any) -> None:
        for module in holders:
            setattr(module, BUILDER, builder)

    put(build_ddtree_tree_from_topk)
    return lambda: put(original)


def _ddtree_module() -> ModuleType:
    """SGLang's module with a builder of the contract."""
    if importlib.util.find_spec("sglang") is None:
        raise ConfigError("SGLang is not installed beside kdray: install a version with DDTree")
    for name in MODULES:
        module = _import_if_there(name)
        builder = vars(module).get(BUILDER) if module else None
        if builder is None:
            continue
        if list(inspect.signature(builder).parameters)[: len(PARAMETERS)] == PARAMETERS:
            return sys.modules[name]
        raise ConfigError(
            f"{name}.{BUILDER} takes other arguments than ({', '.join(PARAMETERS)}, ..): this "
            "version of SGLang has another contract, and was left as it is"
        )
    raise ConfigError(
        f"the installed SGLang has no DDTree: none of {', '.join(MODULES)} defines {BUILDER}; "
        "install a version with DDTree"
    )


def _import_if_there(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None  # the module itself, or a package around it, is not there
        raise ConfigError(f"{name} cannot be imported: {error}") from error
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported: {error}") from error


@cache
def _ops(device: torch.device) -> Ops:
    """SGLang's call names no ops, so that they are kept here, one a device."""
    return load_ops(device)


def _quantise(logprob: Tensor) -> Tensor:
    """core.tree.quantise where the log-probs are."""
    exact = logprob.double()
    absent = exact.isnan() | exact.isneginf()
    clamped = exact.nan_to_num(0.0).clamp(MIN_LOGPROB, 0.0)
    return torch.round(clamped * 2.0**FRACTION_BITS).int().masked_fill(absent, ABSENT)


def _on_host(trees: DraftTrees) -> list[SglangTree]:
    """Every tree of a batch, fetched by one copy: token, parent, depth, mask words, count."""
    requests, nodes, words = trees.mask.shape
    columns = (trees.token, trees.parent, trees.depth, trees.mask.flatten(1))
    packed = torch.cat([*columns, trees.num_nodes[:, None]], dim=1).cpu().numpy()
    token, parent, depth, mask, count = np.split(
        packed, np.cumsum([nodes, nodes, nodes, nodes * words]), axis=1
    )
    seen = mask_to_bool(mask.reshape(requests, nodes, words), nodes)
    return [
        _tree(token[r, :n], parent[r, :n], depth[r, :n], seen[r, :n, :n])
        for r, n in enumerate(count[:, 0].tolist())
    ]


def _tree(
    token: NDArray[np.int32],
    parent: NDArray[np.int32],
    depth: NDArray[np.int32],
    seen: NDArray[np.bool_],
) -> SglangTree:
    parents, tokens = parent.tolist(), token.tolist()
    child_maps: list[dict[int, int]] = [{} for _ in parents]
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    newest_child = [-1] * len(parents)
    for node in range(1, len(parents)):
        above = parents[node]
        child_maps[above][tokens[node]] = node
        if newest_child[above] < 0:
            first_child[above] = node
        else:
            next_sibling[newest_child[above]] = node
        newest_child[above] = node
    return SglangTree(
        node_token_ids=torch.from_numpy(token[1:].astype(np.int64)),
        node_depths=torch.from_numpy(depth[1:].astype(np.int64)),
        parents=parents,
        child_maps=child_maps,
        visibility=torch.from_numpy(seen.copy()),
        retrieve_next_token=torch.tensor(first_child),
        retrieve_next_sibling=torch.tensor(next_sibling),
    )
