"""Every kernel compiles for every architecture served, without spills, within its budgets."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest
import torch

from kdray.kernels import (
    attention_table,
    cuda_absorb,
    cuda_attention,
    cuda_draft,
    cuda_fused,
    cuda_gemm,
    cuda_invariant,
    cuda_moe,
    cuda_moe_many,
    cuda_norm_gemm,
    cuda_reduce,
    cuda_sampling,
    cuda_topk,
    cuda_trees,
    gemm_plan,
    moe_design,
)
from kdray.kernels.gemm_plan import TOKEN_TILES, GemmShape
from kdray.kernels.gemm_table import pair_plan_for, plan_for
from kdray.kernels.loader import MAX_BLOCK_BYTES, Cubin, compile_cubin
from kdray.kernels.nvrtc import FOLDER, Defines
from tests.kernels.fused_cases import RULES

ARCHS = ("sm_90", "sm_120")
REGISTERS = 64  # a thread: 1024 threads of a multiprocessor
MORE_REGISTERS = {  # (entry point, a define or "")
    ("topk_logprob", "K=64"): 80,  # 3 blocks of 256
    ("topk_partial", "K=64"): 80,
    ("commit_kv", ""): 96,  # 8 independent moves in flight
    ("commit_paths", ""): 104,
    ("build_tree_pop_32", ""): 96,  # one small block a request, its frontier in registers
    ("build_tree_pop_64", ""): 96,
    ("build_tree_pop_128", ""): 96,
    ("rms_norm", "WIDTH=16384"): 128,  # the widest that are taken, all in registers
    ("all_reduce_norm", ""): 128,  # one block of 512 at most, of few: all parts in flight
    ("rope_cache", "LATENT_DIM=1024"): 96,
    ("verify_attention", ""): 168,  # one block of 384: queries and results stay in registers
    ("verify_attention_fp32", ""): 128,
    ("plan_attention", ""): 96,  # one block
    ("verify_attention_invariant", ""): 128,  # two blocks of 256
    ("draft_attention", "HEAD_DIM=64"): 128,  # 4 blocks of 128 threads, queries in registers
    ("draft_attention", "HEAD_DIM=128"): 168,  # 3 blocks
    ("draft_attention", "ROW_TILES=4"): 255,  # a block less
    ("draft_attention", "ROW_TILES=8"): 255,
    ("draft_attention_fp32", ""): 255,
    ("moe_w4a16", ""): 128,  # one block of 512: sums and activations stay in registers
    ("moe_w4a16_few", ""): 128,  # as that
    ("moe_w4a16_many_up", ""): 255,  # one block of 256: two sums a result stay in registers
    ("moe_w4a16_many_down", ""): 184,  # of sm_120, one block; sm_90 has two, which bounds it at 128
    ("skinny_gemm", ""): 128,  # 512 threads a multiprocessor
    ("skinny_gemm", "TOKEN_TILES=8"): 168,  # 384 threads
    ("absorb_query", ""): 128,
    ("absorb_query", "TOKEN_TILES=8"): 168,
    ("skinny_gemm_normed", ""): 128,
    ("skinny_gemm_pair", ""): 128,
    ("skinny_gemm_pair", "TOKEN_TILES=8"): 168,
}
ATTENTION_DIMS = ((512, 64), (64, 16), (128, 32))
DRAFT_SHAPES = tuple(product(cuda_draft.STAGES, cuda_draft.TILES))
GEMMS = [  # a rank's matrices of Kimi K2.6 over 8: (shape, gated, dtype of the product)
    (GemmShape(7168, 2112), False, torch.bfloat16),
    (GemmShape(1536, 1536), False, torch.bfloat16),
    (GemmShape(1024, 7168), False, torch.bfloat16),
    (GemmShape(7168, 384), False, torch.float32),
    (GemmShape(7168, 512), True, torch.bfloat16),
    (GemmShape(256, 7168), False, torch.bfloat16),
    (GemmShape(7168, 20480), False, torch.float32),
    (GemmShape(128, 512, 8), False, torch.bfloat16),
    (GemmShape(512, 128, 8), False, torch.bfloat16),
]
PAIR = (GemmShape(7168, 384), GemmShape(7168, 512))  # the router, and a shared expert's first
PAIR_PLANS = {
    tiles: plan for tiles in TOKEN_TILES if (plan := pair_plan_for(*PAIR, tiles)) is not None
}
# Queries from their latent: Kimi K2.6's over 8 and 16, DeepSeek V3's over 8, the demo's.
NORMED = [GemmShape(*sizes) for sizes in ((1536, 1536), (1536, 768), (1536, 3072), (128, 384))]
GEMM_CASES = list(product(GEMMS, TOKEN_TILES))
ABSORBED = ((GemmShape(128, 512, 8), 64), (GemmShape(32, 64, 8), 16))
# width, inner, top_k; 9 of 2048: the parts of a drafter's MLP of 18432
MOE_SIZES = ((7168, 256, 8), (7168, 2048, 8), (7168, 2048, 9), (512, 96, 2))
# What the launchers compile with; a source that is not here has no defines.
INSTANTIATIONS: dict[str, list[Defines]] = {
    "absorb_query": [
        cuda_absorb.absorb_defines(plan_for(shape, tiles), tiles, shape, 1, key_dim, fp8)
        for (shape, key_dim), tiles, fp8 in product(ABSORBED, TOKEN_TILES, (False, True))
    ],
    "all_reduce": [cuda_reduce.defines(dtype) for dtype in cuda_reduce.DTYPES],
    "all_reduce_norm": [
        cuda_reduce.norm_defines(width, dtype, ranks)
        for width, ranks in product((8, 2056, 7168, 16384), (2, 8))
        for dtype in cuda_fused.DTYPES
        if width * dtype.itemsize <= 1 << 15  # 4 vectors a thread of 512
    ],
    "topk_logprob": [
        cuda_topk.defines(k, dtype) for k in cuda_topk.COMPILED_K for dtype in cuda_topk.DTYPES
    ],
    "build_tree": [
        dict(defines) for defines in sorted({design.defines for design in cuda_trees.DESIGNS})
    ],
    "sample_tokens": [cuda_sampling.defines(dtype) for dtype in cuda_topk.DTYPES],
    "rms_norm": [
        cuda_fused.norm_defines(width, dtype)
        for width in (128, 512, 1536, 2048, 7168, 16384)
        for dtype in cuda_fused.DTYPES
    ],
    "rope_cache": [
        cuda_fused.rope_defines(latent, rope, dtype, fp8)
        for latent, rope in ((512, 64), (64, 16), (1024, 128))
        for dtype, fp8 in product(cuda_fused.DTYPES, (False, True))
        if dtype == torch.bfloat16 or not fp8
    ],
    "swiglu": [cuda_fused.swiglu_defines(dtype) for dtype in cuda_fused.DTYPES],
    "route_experts": [cuda_fused.routing_defines(*router) for router in RULES.values()],
    "verify_attention": [
        cuda_attention.defines(*dims, fp8) for dims in ATTENTION_DIMS for fp8 in (False, True)
    ],
    "verify_attention_invariant": [cuda_invariant.defines(*dims) for dims in ATTENTION_DIMS],
    "draft_attention": [cuda_draft.defines(*shape) for shape in DRAFT_SHAPES],
    "skinny_gemm": [
        cuda_gemm.defines(plan_for(shape, tiles), tiles, shape.steps, 1, gated, dtype)
        for (shape, gated, dtype), tiles in GEMM_CASES
    ],
    "skinny_gemm_normed": [
        cuda_norm_gemm.normed_defines(plan_for(shape, 1), shape.inputs) for shape in NORMED
    ],
    "skinny_gemm_pair": [
        cuda_gemm.pair_defines(plan, tiles, PAIR[0].steps, 1, torch.float32)
        for tiles, plan in PAIR_PLANS.items()
    ],
    "sort_rows": [
        cuda_moe.sort_defines(experts, tiles) for experts in (8, 384, 1024) for tiles in (1, 4)
    ],
    "sort_many_rows": [cuda_moe_many.sort_defines(experts) for experts in (8, 384, 1024)],
    "moe_w4a16_many": [cuda_moe_many.many_defines(*sizes) for sizes in MOE_SIZES],
    "moe_w4a16_few": [moe_design.few_defines(*sizes) for sizes in MOE_SIZES if sizes[1] <= 512],
    "moe_w4a16": [moe_design.moe_defines(*sizes, n) for sizes in MOE_SIZES for n in (1, 2, 4)],
}
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))
CASES = [(name, defines) for name in SOURCES for defines in INSTANTIATIONS.get(name, [{}])]


@cache
def compiled(name: str, arch: str, defines: tuple[tuple[str, str | int], ...]) -> Cubin:
    return compile_cubin(name, arch, dict(defines))


def words(defines: Defines) -> list[str]:
    return [f"{key}={value}" for key, value in defines.items()]


def budget(entry: str, defines: Defines) -> int:
    named = [MORE_REGISTERS.get((entry, word)) for word in ["", *words(defines)]]
    return max([REGISTERS, *(count for count in named if count is not None)])


def test_the_table_names_sources_that_exist() -> None:
    assert set(INSTANTIATIONS) <= set(SOURCES)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("name", "defines"), CASES, ids=[" ".join([name, *words(defines)]) for name, defines in CASES]
)
def test_a_kernel_keeps_its_budgets(name: str, defines: Defines, arch: str) -> None:
    cubin = compiled(name, arch, tuple(defines.items()))
    assert cubin.entries, "no entry point"
    for entry, usage in cubin.entries.items():
        assert usage.spill_bytes == 0, f"{entry} spills:\n{cubin.log}"
        assert usage.stack_bytes == 0, f"{entry} keeps an array in local memory:\n{cubin.log}"
        assert usage.registers <= budget(entry, defines), f"{entry}: {usage}"
        assert usage.shared_bytes <= MAX_BLOCK_BYTES, f"{entry}: {usage}"
    assert "warning" not in cubin.log


def test_tree_designs_fit_with_their_dynamic_memory() -> None:
    for design in cuda_trees.DESIGNS:
        usage = compiled("build_tree", ARCHS[0], design.defines).entries[design.entry]
        assert usage.shared_bytes + design.shared_bytes <= MAX_BLOCK_BYTES, design


@pytest.mark.parametrize("dims", ATTENTION_DIMS, ids=str)
def test_attention_fits_with_its_dynamic_memory(dims: tuple[int, int]) -> None:
    for dtype in attention_table.SHAPES:  # that a block needs no more, the source asserts
        for fp8 in (False, True):
            assert cuda_attention.shared_bytes(dtype, *dims, fp8) <= MAX_BLOCK_BYTES


@pytest.mark.parametrize("shape", DRAFT_SHAPES, ids=str)
def test_draft_attention_fits_with_its_dynamic_memory(shape: tuple[int, int]) -> None:
    for dtype in cuda_draft.ENTRIES:
        assert cuda_draft.shared_bytes(dtype, *shape) <= MAX_BLOCK_BYTES


def test_products_fit_with_their_dynamic_memory() -> None:
    for (shape, _, _), tiles in GEMM_CASES:
        plan = plan_for(shape, tiles)
        assert gemm_plan.fits(plan, tiles)
        fixed = gemm_plan.static_bytes(plan, tiles)
        whole = gemm_plan.shared_bytes(plan, tiles, shape.steps) + fixed
        assert whole <= MAX_BLOCK_BYTES, (shape, plan)


def test_pairs_fit_with_their_dynamic_memory() -> None:
    assert set(PAIR_PLANS) == set(TOKEN_TILES)
    for tiles, plan in PAIR_PLANS.items():
        whole = gemm_plan.shared_bytes(plan, tiles, PAIR[0].steps)
        assert whole + gemm_plan.static_bytes(plan, tiles) <= MAX_BLOCK_BYTES, plan


def test_rows_that_a_product_norms_fit_a_block() -> None:
    for shape in NORMED:
        plan = plan_for(shape, 1)
        assert cuda_norm_gemm.is_whole(plan, shape.inputs), shape
        defines = cuda_norm_gemm.normed_defines(plan, shape.inputs)
        fixed = compiled("skinny_gemm_normed", ARCHS[0], tuple(defines.items()))
        static = fixed.entries["skinny_gemm_normed"].shared_bytes
        whole = gemm_plan.shared_bytes(plan, 1, shape.steps) + static
        assert whole <= MAX_BLOCK_BYTES, (shape, plan)


def test_experts_fit_with_their_dynamic_memory() -> None:
    sorting = compiled("sort_rows", ARCHS[0], tuple(cuda_moe.sort_defines(1024, 1).items()))
    fixed = sorting.entries["sort_rows"].shared_bytes
    assert fixed + cuda_moe.sort_bytes(1024) <= MAX_BLOCK_BYTES
    for design in (moe_design.DESIGN, moe_design.FEW_DESIGN):  # of all its own, the source asserts
        assert design.shared_bytes <= MAX_BLOCK_BYTES
    assert cuda_moe_many.shared_bytes() <= MAX_BLOCK_BYTES


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_says_what_it_is(name: str) -> None:
    """The head of a .cu file is its documentation."""
    text = (FOLDER / f"{name}.cu").read_text()
    head = re.match(r"(//[^\n]*\n)+", text)
    assert head is not None and len(head[0].splitlines()) >= 6
    assert re.search(r"\b[Gg]rid|[Bb]lock", head[0]), f"the head of {name}.cu tells no grid"


def test_one_source_serves_every_architecture() -> None:
    """Nothing that sm_90 and sm_120 do not share; bulk copies of plain rows they do."""
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        text = path.read_text()
        assert not re.search(r"wgmma|bulk\.tensor|tensormap|\.cluster|setmaxnreg", text), path
