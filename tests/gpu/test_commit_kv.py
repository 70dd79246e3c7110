"""commit_kv.cu against indexing: every byte of every cache, moved or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kdray.core.plan import AcceptedPaths
from kdray.kernels.cuda_commit import (
    CacheTable,
    SlotState,
    advance_requests,
    commit_kv,
    commit_paths,
)
from kdray.kernels.loader import KernelLoader
from kdray.kernels.reference import ReferenceOps
from tests.kernels.random_paths import PagedPaths, random_paths

pytestmark = pytest.mark.gpu


def caches_of(num_rows: int, device: torch.device) -> list[Tensor]:
    """Latents, drafter K/V, features, rows that no 16 bytes divide, and a base off by 4 bytes."""
    shapes = [((576,), torch.bfloat16), ((576,), torch.float32), ((2, 3, 16), torch.bfloat16)]
    shapes += [((1536,), torch.bfloat16), ((3,), torch.float32), ((10,), torch.bfloat16)]
    caches = [noise((num_rows, *shape), dtype, device) for shape, dtype in shapes]
    return [*caches, noise((num_rows * 8 + 1,), torch.float32, device)[1:].view(num_rows, 8)]


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random bits, so that not a NaN may change."""
    words = -(-int(np.prod(shape)) * dtype.itemsize // 4)
    bits = torch.randint(-(2**31), 2**31, (words,), device=device).int()
    return bits.view(dtype)[: int(np.prod(shape))].view(shape)


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


def moved(caches: list[Tensor], source: Tensor, target: Tensor) -> list[Tensor]:
    expected = [cache.clone() for cache in caches]
    ReferenceOps(caches[0].device).commit_kv(expected, source, target)
    return expected


def assert_same(caches: list[Tensor], expected: list[Tensor]) -> None:
    for i, (cache, wanted) in enumerate(zip(caches, expected, strict=True)):
        assert torch.equal(bits(cache), bits(wanted)), f"cache {i}"


@pytest.mark.parametrize("moves", [0, 1, 2, 7, 31, 448, 960, 4096])
@pytest.mark.parametrize("layout", ["anywhere", "cycle", "shift"])
def test_rows_move_in_every_cache(loader: KernelLoader, moves: int, layout: str) -> None:
    rng = np.random.default_rng(moves)
    num_rows = 3 * moves + 5
    target = rng.permutation(num_rows)[:moves]
    sources = {
        "anywhere": rng.integers(0, num_rows, moves),
        "cycle": np.roll(target, 1),  # every row read is written too
        "shift": np.minimum(target + 1, num_rows - 1),
    }
    slots = [torch.from_numpy(a).to(loader.device) for a in (sources[layout], target)]
    caches = caches_of(num_rows, loader.device)
    expected = moved(caches, *slots)
    commit_kv(loader, CacheTable.of(caches), *slots)
    assert_same(caches, expected)


def test_rows_that_no_cache_has_are_left_out(loader: KernelLoader) -> None:
    caches = caches_of(9, loader.device)
    expected = moved(caches, *(torch.tensor([i], device=loader.device) for i in (8, 0)))
    source = torch.tensor([8, 9, -1, 3, 3, 2**40], device=loader.device)
    target = torch.tensor([0, 1, 2, 9, -5, 4], device=loader.device)
    commit_kv(loader, CacheTable.of(caches), source, target)
    assert_same(caches, expected)


def test_sixty_one_layers_move_by_one_launch(loader: KernelLoader) -> None:
    caches = [noise((640, 576), torch.bfloat16, loader.device) for _ in range(61)]
    target = torch.randperm(640, device=loader.device)[:448]
    expected = moved(caches, target.roll(1), target)
    commit_kv(loader, CacheTable.of(caches), target.roll(1), target)
    assert_same(caches, expected)


def test_what_the_kernel_cannot_move_is_refused(loader: KernelLoader) -> None:
    device = loader.device
    odd = torch.zeros(4, 3, dtype=torch.bfloat16, device=device)
    for cache in (odd, torch.zeros(4, 8, device=device).T, torch.zeros(4, 0, device=device)):
        with pytest.raises(
            ValueError, match=r"cache 0 .* must be contiguous, with rows of a multip"
        ):
            CacheTable.of([cache])
    table = CacheTable.of([torch.zeros(4, 8, device=device)])
    many = torch.zeros(4097, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="at most 4096 rows at once, not 4097"):
        commit_kv(loader, table, many, many)


def state_of(paged: PagedPaths, device: torch.device) -> SlotState:
    return SlotState(
        root=torch.full_like(paged.root_position, 77, device=device),
        root_position=paged.root_position.to(device),
        page_table=paged.page_table.to(device),
        page_size=paged.page_size,
    )


def on(device: torch.device, paths: AcceptedPaths) -> AcceptedPaths:
    return AcceptedPaths(
        node=paths.node.to(device), length=paths.length.to(device), bonus=paths.bonus.to(device)
    )


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(
    ("requests", "width", "nodes"),
    [(1, 1, 9), (1, 2, 9), (5, 8, 9), (64, 8, 33), (17, 16, 65), (3, 65, 300)],
)
def test_accepted_nodes_become_contiguous(
    loader: KernelLoader, requests: int, width: int, nodes: int, page_size: int
) -> None:
    rng = np.random.default_rng(requests * width + page_size)
    paged = random_paths(rng, requests=requests, width=width, nodes=nodes, page_size=page_size)
    slots = [torch.from_numpy(rows).to(loader.device) for rows in paged.moves()]
    caches = caches_of(paged.num_rows, loader.device)
    expected = moved(caches, *slots)
    where = (on(loader.device, paged.paths), state_of(paged, loader.device))
    commit_paths(loader, CacheTable.of(caches), *where, paged.slot.to(loader.device))
    assert_same(caches, expected)


def test_positions_behind_the_page_table_are_left_out(loader: KernelLoader) -> None:
    cache = noise((16, 576), torch.bfloat16, loader.device)
    before = cache.clone()
    device = loader.device
    state = SlotState(
        root=torch.zeros(1, dtype=torch.int32, device=device),
        root_position=torch.tensor([6], dtype=torch.int32, device=device),
        page_table=torch.tensor([[3, 1]], dtype=torch.int32, device=device),
        page_size=4,
    )
    node = torch.tensor([[0, 2, -9, 2**30]], dtype=torch.int32, device=device)
    length = torch.tensor([4], dtype=torch.int32, device=device)
    paths = AcceptedPaths(node=node, length=length, bonus=length)
    commit_paths(loader, CacheTable.of([cache]), paths, state)
    assert torch.equal(bits(cache), bits(before))


def test_features_of_a_step_move_as_a_cache_of_their_own(loader: KernelLoader) -> None:
    requests, nodes, device = 6, 9, loader.device
    rng = np.random.default_rng(3)
    paths = random_paths(rng, requests=requests, width=5, nodes=nodes, page_size=1).paths
    features = noise((requests * nodes, 96), torch.bfloat16, device)
    expected = features.clone().view(requests, nodes, 96)
    for r in range(requests):
        length = int(paths.length[r])
        expected[r, :length] = features.view(requests, nodes, 96)[r, paths.node[r, :length].long()]
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    start = SlotState(root=rows, root_position=rows * 0, page_table=rows[:, None], page_size=nodes)
    commit_paths(loader, CacheTable.of([features]), on(device, paths), start)
    assert_same([features], [expected.flatten(0, 1)])


@pytest.mark.parametrize("requests", [1, 64, 300])
def test_roots_advance_to_the_bonus_token(loader: KernelLoader, requests: int) -> None:
    rng = np.random.default_rng(requests)
    paged = random_paths(rng, requests=requests, width=8, nodes=9, page_size=4)
    root, position = torch.full_like(paged.root_position, 77), paged.root_position.clone()
    for r, slot in enumerate(paged.slot.tolist()):
        if slot >= 0:
            root[slot] = paged.paths.bonus[r]
            position[slot] += paged.paths.length[r]
    state = state_of(paged, loader.device)
    advance_requests(loader, on(loader.device, paged.paths), state, paged.slot.to(loader.device))
    assert torch.equal(state.root.cpu(), root)
    assert torch.equal(state.root_position.cpu(), position)


def test_without_slots_a_request_is_its_own(loader: KernelLoader) -> None:
    device = loader.device
    state = SlotState(
        root=torch.tensor([5, 6, 7], dtype=torch.int32, device=device),
        root_position=torch.tensor([10, 20, 30], dtype=torch.int32, device=device),
        page_table=torch.zeros(3, 1, dtype=torch.int32, device=device),
        page_size=64,
    )
    length = torch.tensor([1, 4], dtype=torch.int32, device=device)
    bonus = torch.tensor([50, 60], dtype=torch.int32, device=device)
    advance_requests(loader, AcceptedPaths(node=bonus[:, None], length=length, bonus=bonus), state)
    assert state.root.tolist() == [50, 60, 7]
    assert state.root_position.tolist() == [11, 24, 30]
