from __future__ import annotations

import torch

from kdray.kernels.ops import Ops


def test_rows_move_in_every_cache(ops: Ops) -> None:
    caches = [torch.randn(6, 3), torch.randn(6, 2).bfloat16()]
    before = [cache.clone() for cache in caches]
    ops.commit_kv(caches, torch.tensor([5, 0]), torch.tensor([1, 2]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 5, 0, 3, 4, 5]])


def test_all_rows_are_read_before_any_is_written(ops: Ops) -> None:
    cache = torch.arange(5.0)[:, None]
    ops.commit_kv([cache], torch.tensor([1, 2, 3, 0]), torch.tensor([0, 1, 2, 3]))
    assert cache.flatten().tolist() == [1, 2, 3, 0, 4]


def test_an_empty_commit_changes_nothing(ops: Ops) -> None:
    cache = torch.ones(2, 2)
    ops.commit_kv([cache], torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    ops.commit_kv([], torch.tensor([0]), torch.tensor([1]))
    assert (cache == 1).all()
