"""kdray's builder against the contract of SGLang's, and the swap in an installed SGLang."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kdray.errors import ConfigError
from kdray.integrations import sglang
from kdray.integrations.sglang import (
    SglangTree,
    build_ddtree_tree_from_topk,
    build_ddtree_trees_from_topk,
    patch,
)
from tests.integrations.plain_heap import PlainTree, plain_tree

NEAR = 1e-5  # nat; nearer scores may change places by rounding to fixed point


def rows(rng: np.random.Generator, depth: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Best-first log-probs and distinct token ids [L, K], sharp and flat rows mixed."""
    logits = rng.normal(0.0, rng.uniform(0.5, 4.0, (depth, 1)), (depth, 64))
    logprobs = torch.from_numpy(logits).float().log_softmax(dim=-1)
    best = logprobs.topk(width, dim=-1)
    ids = np.stack([rng.permutation(1000)[:width] for _ in range(depth)])
    return best.values, torch.from_numpy(ids)


def has_near_ties(tree: PlainTree) -> bool:
    scores = np.array(tree.scores)
    return bool((scores[:-1] - scores[1:] < NEAR).any())


def assert_equal(tree: SglangTree, expected: PlainTree) -> None:
    tensors = (
        (tree.node_token_ids, expected.tokens, torch.int64),
        (tree.node_depths, expected.depths, torch.int64),
        (tree.visibility, expected.visibility, torch.bool),
        (tree.retrieve_next_token, expected.first_child, torch.int64),
        (tree.retrieve_next_sibling, expected.next_sibling, torch.int64),
    )
    for tensor, values, dtype in tensors:
        assert tensor.dtype == dtype and tensor.device.type == "cpu"
        assert tensor.tolist() == values
    assert tree.parents == expected.parents
    assert tree.child_maps == expected.child_maps


def test_a_thousand_random_trees_equal_the_contract() -> None:
    rng = np.random.default_rng(7)
    compared = 0
    while compared < 1000:
        depth, width = int(rng.integers(1, 9)), int(rng.integers(1, 17))
        budget = int(rng.integers(1, 25))
        logprobs, ids = rows(rng, depth, width)
        expected = plain_tree(logprobs.double().tolist(), ids.tolist(), budget)
        if has_near_ties(expected):
            continue
        assert_equal(build_ddtree_tree_from_topk(logprobs, ids, budget), expected)
        compared += 1


def test_a_batch_equals_its_requests_one_by_one() -> None:
    rng = np.random.default_rng(8)
    pairs = [rows(rng, 5, 6) for _ in range(4)]
    logprobs, ids = (torch.stack(column) for column in zip(*pairs, strict=True))
    budgets = [12, 0, 3, 40]
    batch = build_ddtree_trees_from_topk(logprobs, ids, budgets)
    for tree, (row, tokens), budget in zip(batch, pairs, budgets, strict=True):
        expected = plain_tree(row.double().tolist(), tokens.tolist(), budget)
        assert not has_near_ties(expected)
        assert_equal(tree, expected)


@pytest.mark.parametrize(("depth", "budget"), [(0, 5), (3, 0), (3, -1)])
def test_nothing_to_draft_is_a_root_alone(depth: int, budget: int) -> None:
    logprobs, ids = torch.zeros(depth, 4), torch.zeros(depth, 4, dtype=torch.int64)
    tree = build_ddtree_tree_from_topk(logprobs, ids, budget)
    assert_equal(tree, plain_tree([], [], 0))
    assert tree.node_token_ids.shape == (0,) and tree.visibility.tolist() == [[True]]


def test_the_workspace_and_half_precision_of_the_caller_are_taken() -> None:
    logprobs = torch.tensor([[-0.25, -2.0], [-0.5, -1.0]], dtype=torch.bfloat16)
    ids = torch.tensor([[7, 8], [9, 5]])
    tree = build_ddtree_tree_from_topk(logprobs, ids, 3, workspace=object())
    assert tree.node_token_ids.tolist() == [7, 9, 5] and tree.parents == [-1, 0, 1, 1]


def test_candidates_that_are_not_there_are_no_nodes() -> None:
    logprobs = torch.tensor([[-0.25, -torch.inf], [-0.5, torch.nan]])
    tree = build_ddtree_tree_from_topk(logprobs, torch.tensor([[7, 8], [9, 5]]), 9)
    assert tree.node_token_ids.tolist() == [7, 9]


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"both be \[R, L, K\], got \[1, 2, 3\] and \[1, 2, 4\]"):
        build_ddtree_tree_from_topk(torch.zeros(2, 3), torch.zeros(2, 4), 1)


UTILS = "def build_ddtree_tree_from_topk(top_log_probs, top_token_ids, budget): return 'theirs'\n"
WORKER = "from sglang.srt.speculative.dflash_ddtree_utils import build_ddtree_tree_from_topk\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of SGLang's speculation modules in an installation without any yet."""
    folder = tmp_path / "sglang" / "srt" / "speculative"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_patch_swaps_the_builder_wherever_it_was_imported(install: Path) -> None:
    (install / "dflash_ddtree_utils.py").write_text(UTILS)
    (install / "worker.py").write_text(WORKER)
    import sglang.srt.speculative.worker as worker  # type: ignore[import-not-found]

    utils = sys.modules["sglang.srt.speculative.dflash_ddtree_utils"]
    undo = patch()
    for module in (utils, worker):
        assert module.build_ddtree_tree_from_topk is build_ddtree_tree_from_topk
    patch()()  # a second time changes nothing, nor does taking that back
    assert worker.build_ddtree_tree_from_topk is build_ddtree_tree_from_topk
    undo()
    for module in (utils, worker):
        assert module.build_ddtree_tree_from_topk(0, 0, 0) == "theirs"


def test_an_sglang_without_ddtree_is_refused(install: Path) -> None:
    with pytest.raises(ConfigError, match="has no DDTree"):
        patch()
    (install / "ddtree_utils.py").write_text("def build_ddtree_tree(draft_logits, budget): ...\n")
    with pytest.raises(ConfigError, match="has no DDTree"):
        patch()


def test_another_contract_is_refused_and_left_alone(install: Path) -> None:
    (install / "ddtree_utils.py").write_text(
        UTILS.replace("top_log_probs, top_token_ids", "top_token_ids, top_log_probs")
    )
    with pytest.raises(ConfigError, match="another contract"):
        patch()
    module = sys.modules["sglang.srt.speculative.ddtree_utils"]
    assert module.build_ddtree_tree_from_topk(0, 0, 0) == "theirs"


def test_a_broken_sglang_says_what_is_missing(install: Path) -> None:
    (install / "dflash_ddtree_utils.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ConfigError, match=r"cannot be imported.*a_package_that_is_not_there"):
        patch()


def test_without_sglang_patch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        patch()
