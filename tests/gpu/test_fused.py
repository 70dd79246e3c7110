"""The fused ops on a GPU: against float64, in graphs, and under a model's whole forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdray.demo import target_path
from kdray.kernels.attention_batch import AttentionBatch, DeviceAttentionBatch
from kdray.kernels.cuda import CudaOps
from kdray.kernels.cuda_fused import CudaFused
from kdray.kernels.loader import KernelLoader
from kdray.kernels.ops import Ops, load_ops
from kdray.model.batch import ForwardBatch, TargetOutput
from kdray.model.moe import DenseMLP, MoE, Router
from kdray.model.target import TargetModel
from tests.kernels import fused_cases as cases
from tests.model.paged import PagedRunner, Part, make_batch

pytestmark = pytest.mark.gpu

ROWS = [1, 9, 64, 577]
PARENTS = [0, 0, 1, 1, 2, 4]


@pytest.fixture(scope="module")
def fused(loader: KernelLoader) -> CudaFused:
    return CudaFused(loader)


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 products in float32, as on a CPU."""
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("width", "gap"),
    [(8, 0), (128, 3), (512, 0), (1536, 36), (2048, 0), (2056, 1), (7168, 0), (16384, 0)],
)
def test_rms_norm(fused: CudaFused, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    cases.check_norm(fused, rows, width, dtype, gap)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("joined", [False, True], ids=["own product", "joined product"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", cases.ATTENTIONS)
def test_rope_cache(
    fused: CudaFused, name: str, rows: int, joined: bool, dtype: torch.dtype
) -> None:
    cases.check_rope(fused, rows, cases.ATTENTIONS[name], dtype, joined)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", cases.ATTENTIONS)
def test_rope_cache_in_fp8(fused: CudaFused, name: str, rows: int) -> None:
    cases.check_rope_fp8(fused, rows, cases.ATTENTIONS[name])


def test_rows_of_padding_leave_the_cache_alone(fused: CudaFused) -> None:
    cases.check_padding(fused)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 16), (5, 48), (64, 3, 256), (9, 4112), (577, 4096), (2, 36864)], ids=str
)
def test_swiglu(fused: CudaFused, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cases.check_swiglu(fused, shape, dtype)


def test_swiglu_far_out(fused: CudaFused) -> None:
    cases.check_swiglu_far_out(fused)


@pytest.mark.parametrize("kind", cases.ROUTINGS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", cases.RULES)
def test_route_experts(fused: CudaFused, name: str, rows: int, kind: str) -> None:
    cases.check_routing(fused, rows, name, kind)


@pytest.mark.parametrize("name", cases.RULES)
def test_padding_goes_to_no_expert(fused: CudaFused, name: str) -> None:
    cases.check_routing_of_padding(fused, name)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_per_head(fused: CudaFused, rows: int, dtype: torch.dtype) -> None:
    cases.check_per_head(fused, rows, dtype)


def test_a_row_does_not_depend_on_its_batch(fused: CudaFused) -> None:
    device = fused.device
    norm = cases.some_norm(7168, torch.bfloat16, device)
    x = cases.drawn(1, 300, 7168).to(device, torch.bfloat16)
    logits, bias = (t.to(device) for t in cases.routing_inputs(300, 384, "normal"))
    rule = cases.RULES["kimi"][1]
    whole = fused.rms_norm(x, norm), *fused.route_experts(logits, bias, rule)
    for t in (0, 131, 299):
        row = slice(t, t + 1)
        alone = fused.rms_norm(x[row], norm), *fused.route_experts(logits[row], bias, rule)
        assert all(torch.equal(a[row], b) for a, b in zip(whole, alone, strict=True))


def random_moe(ops: Ops, device: torch.device, dtype: torch.dtype) -> MoE:
    """The bench model's router over small experts: 64 of 96, 8 a row, width 128."""
    experts, rule = cases.RULES["bench"]
    weights = [
        (0.1 * cases.drawn(n, *shape)).to(device, dtype)
        for n, shape in enumerate([(128, 384), (192, 128), (experts, 128, 192), (experts, 96, 128)])
    ]
    bias = 0.3 * cases.drawn(5, experts)
    router = Router(ops, (0.1 * cases.drawn(6, 128, experts)).to(device), bias.to(device), rule)
    return MoE(ops, router, weights[2], weights[3], DenseMLP(ops, weights[0], weights[1]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 600])
def test_experts_in_a_graph_equal_the_loop_over_them(
    device: torch.device, rows: int, dtype: torch.dtype
) -> None:
    """Rows and choices change between replays."""
    moe = random_moe(CudaOps(device), device, dtype)
    x = torch.zeros(rows, 128, device=device, dtype=dtype)
    moe.partial(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe.partial(x)
    close = 2e-5 if dtype == torch.float32 else 0.03
    for seed in range(3):
        x.copy_(cases.drawn(seed, rows, 128))
        graph.replay()
        expert, weight = moe.router.route(x)
        outputs = moe._by_expert(x, expert).float()
        wanted = ((outputs * weight[..., None]).sum(1) + moe.shared.partial(x)).to(dtype)
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)


def decode_step(runner: PagedRunner) -> tuple[ForwardBatch, list[int]]:
    """Three requests that decode behind prompts of different lengths: a tree, a chain, a root; and
    their numbers of nodes."""
    texts = [runner.text(120) for _ in range(3)]
    prompts = [list(range(9, 9 + length)) for length in (70, 30, 1)]
    runner.run(*(Part(*pair) for pair in zip(texts, prompts, strict=True)))
    parts = [
        Part(texts[0], [40], [41, 42, 43, 44, 45, 46], PARENTS),
        Part(texts[1], [50], [51, 52], [0, 1]),
        Part(texts[2], [60]),
    ]
    return make_batch(parts, runner.page_size), [7, 3, 1]


def on_device(
    batch: ForwardBatch, num_nodes: list[int], device: torch.device
) -> tuple[ForwardBatch, Tensor]:
    """The step as a bucket of requests by the most nodes, its rest padding; and the rows of it that
    are the batch's."""
    host, nodes = batch.attention, max(num_nodes)
    assert isinstance(host, AttentionBatch)
    root = torch.tensor(host.num_cached)[:, None]
    node, count = torch.arange(nodes), torch.tensor(num_nodes)
    real = (node < count[:, None]).flatten().nonzero()[:, 0]
    token = torch.zeros(len(num_nodes) * nodes, dtype=torch.int64)
    position = root.expand(-1, nodes).flatten()
    attention = DeviceAttentionBatch(
        num_cached=root[:, 0].int().to(device),
        num_nodes=count.int().to(device),
        page_table=host.page_table.to(device),
        page_size=host.page_size,
        mask=host.mask.to(device),
    )
    moved = ForwardBatch(
        token=token.index_copy(0, real, batch.token).to(device),
        position=position.index_copy(0, real, batch.position).to(device),
        slot=host.slots.gather(1, root + node).flatten().to(device),
        attention=attention,
    )
    return moved, real


@pytest.fixture(scope="module")
def host() -> PagedRunner:
    return PagedRunner(TargetModel.load(target_path(), ops=load_ops("cpu"), taps=(0, 3)))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@torch.inference_mode()
def test_a_forward_pass_in_a_graph_equals_the_eager_one_and_the_cpu(
    host: PagedRunner, device: torch.device, dtype: torch.dtype
) -> None:
    """No wait for the host anywhere: a step that decodes is captured whole, logits included."""
    batch, num_nodes = decode_step(host)
    model = TargetModel.load(
        target_path(), ops=CudaOps(device), dtype=dtype, device=device, taps=(0, 3)
    )
    # On the device whole page tables are read; what no one sees must be finite.
    started = [cache.nan_to_num().to(device, dtype) for cache in host.caches]
    moved, real = on_device(batch, num_nodes, device)

    def forward(caches: list[Tensor]) -> tuple[TargetOutput, Tensor]:
        output = model.forward(moved, caches)
        return output, model.logits(output.hidden)

    caches = [cache.clone() for cache in started]
    forward(caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, logits = forward(caches)
    for shift in (0, 300, 700):
        moved.token.index_copy_(0, real.to(device), (batch.token + shift).to(device))
        for cache, start in zip(caches, started, strict=True):
            cache.copy_(start)
        graph.replay()
        again = [cache.clone() for cache in started]
        eager, eager_logits = forward(again)
        assert torch.equal(logits, eager_logits)
        assert torch.equal(output.features, eager.features)
        assert all(map(torch.equal, caches, again))
        shifted = replace(batch, token=batch.token + shift)
        assert_like_cpu(host, shifted, logits.cpu()[real], dtype)


def assert_like_cpu(
    host: PagedRunner, batch: ForwardBatch, logits: Tensor, dtype: torch.dtype
) -> None:
    caches = [cache.clone() for cache in host.caches]
    wanted = host.model.logits(host.model.forward(batch, caches).hidden)
    error = (logits - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    if dtype == torch.float32:
        assert error.max() < 1e-4
    else:  # a row whose expert choice flips is far off; most are not
        assert error.median() < 0.05


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "rope_cache", "swiglu", "route_experts"])
def test_an_op_in_a_graph_follows_its_inputs(
    fused: CudaFused, name: str, dtype: torch.dtype
) -> None:
    run, inputs = graph_case(fused, name, dtype)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(3):
        for i, x in enumerate(inputs):
            x.copy_(cases.drawn(10 * seed + i, *x.shape))
        graph.replay()
        wanted = run()
        assert all(map(torch.equal, found, wanted))


def graph_case(
    fused: CudaFused, name: str, dtype: torch.dtype
) -> tuple[Callable[[], tuple[Tensor, ...]], list[Tensor]]:
    """An op over static inputs, several launches in a row, and the inputs that change."""
    device = fused.device
    x = torch.zeros(33, 1152, device=device, dtype=dtype)
    norm, narrow = cases.some_norm(1152, dtype, device), cases.some_norm(512, dtype, device)
    if name == "rms_norm":
        return lambda: fused.add_rms_norm(x, fused.rms_norm(x, norm), norm), [x]
    if name == "swiglu":
        return lambda: (fused.swiglu(fused.swiglu(x)),), [x]
    if name == "route_experts":
        experts, rule = cases.RULES["deepseek"]
        logits, bias = torch.zeros(33, experts, device=device), torch.zeros(experts, device=device)
        return lambda: fused.route_experts(logits, bias, rule), [logits, bias]
    query = torch.zeros(33, 8, 192, device=device, dtype=dtype)
    kv, cache = x[:, :576], torch.zeros(40, 576, device=device, dtype=dtype)
    turns = torch.polar(torch.ones(33, 32), cases.drawn(2, 33, 32)).to(device)
    rows = cases.SomeRows(turns, torch.arange(33, device=device))
    return (
        lambda: (fused.rope_cache(query, kv, cache, rows, narrow)[..., 512:], cache.clone()),
        [query, x],
    )
