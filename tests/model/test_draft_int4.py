"""A drafter's MLPs in INT4: what is kept is the nearest, and the parts add up to the MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kdray import LLM, EngineConfig, SamplingParams
from kdray.config import DraftWeightType
from kdray.demo.text import held_out_prompts
from kdray.errors import ConfigError
from kdray.kernels.cuda import CudaOps
from kdray.kernels.moe_layout import Int4, PackedExperts, unpack, unwoven
from kdray.kernels.ops import Ops, load_ops
from kdray.kernels.reference_moe import values
from kdray.model import draft_int4
from kdray.model.chat import encode_chat
from kdray.model.dflash import WholeDraftMLP
from kdray.model.dflash_config import DFlashConfig
from kdray.model.dflash_weights import load_weights
from kdray.model.draft_int4 import (
    EveryPart,
    PackedDraftMLP,
    check_groups,
    int4_of,
    mlp_form,
    part_of,
    rounded,
)
from tests.kernels.simt_loader import simt_loader
from tests.model.draft_rounds import Rounds, load, tables_of
from tests.model.plain_dflash import draft_logits
from tests.model.tiny_drafter import draft_config, draft_tensors, write_drafter

CPU = torch.device("cpu")
FIELDS = draft_config(hidden_size=32, intermediate_size=96)


@pytest.fixture
def parts_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_int4, "PART", 32)


def random_mlp(width: int, inner: int, part: int) -> tuple[PackedDraftMLP, list[Tensor]]:
    """Packed, and the float32 values of its gate, up [I, E] and down [E, I]."""
    experts = PackedExperts.empty(inner // part, width, part, CPU)
    gate, up, down = (
        int4_of(torch.randn(*shape) * shape[1] ** -0.5)
        for shape in ((inner, width), (inner, width), (width, inner))
    )
    for number in range(inner // part):
        own = slice(number * part, (number + 1) * part)
        groups = slice(own.start // 32, own.stop // 32)
        experts.put(
            number,
            *(Int4(weight.q[own], weight.scale[own]) for weight in (gate, up)),
            Int4(down.q[:, own], down.scale[:, groups]),
        )
    mlp = PackedDraftMLP(experts, EveryPart.of(inner // part, CPU))
    return mlp, [values(weight) for weight in (gate, up, down)]


def by_float64(normed: Tensor, weights: list[Tensor]) -> Tensor:
    gate, up, down = (weight.double() for weight in weights)
    inner = torch.nn.functional.silu(normed.double() @ gate.T) * (normed.double() @ up.T)
    return inner @ down.T


def test_weights_on_the_grid_come_back_exactly() -> None:
    """Sevens of steps of a power of two, and a group's largest of seven and a half."""
    q = torch.randint(-7, 8, (64, 3, 32)).float()
    q[..., 5] = -7.5
    steps = 2.0 ** torch.randint(-9, 3, (64, 3, 1))
    kept = int4_of((q * steps).flatten(-2))
    assert torch.equal(kept.scale, steps.squeeze(-1).bfloat16())
    q[..., 5] = -8
    assert torch.equal(kept.q.unflatten(-1, (-1, 32)).float(), q)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 1.0, 300.0]))
def test_every_weight_becomes_the_nearest_of_its_group(seed: int, size: float) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * size
    kept = int4_of(weight)
    scale = kept.scale.float().repeat_interleave(32, dim=-1)
    levels = torch.arange(-8, 8).float() * scale[..., None]
    nearest = (levels - weight[..., None]).abs().amin(-1)
    assert torch.equal((rounded(weight) - weight).abs(), nearest)
    largest = weight.abs().unflatten(-1, (-1, 32)).amax(-1)
    assert torch.equal(kept.scale, (largest / 7.5).bfloat16())


@pytest.mark.usefixtures("parts_of_32")
def test_what_is_loaded_is_the_int4_of_the_file(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path, FIELDS)
    config, stored = DFlashConfig.from_folder(folder), draft_tensors(FIELDS)
    packed, spread, whole = (
        load_weights(folder, config, torch.float32, CPU, form)  # type: ignore[arg-type]
        for form in ("packed", "rounded", "whole")
    )
    for index, layer in enumerate(packed.layers):
        names = [f"layers.{index}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        gate, up, down = (int4_of(stored[name]) for name in names)
        assert isinstance(layer.mlp, PackedDraftMLP) and layer.mlp.parts.num_experts == 3
        found_gate, found_up = unwoven(unpack(layer.mlp.parts.gate_up.flatten(0, 1)))
        found_down = unpack(layer.mlp.parts.down)
        for found, wanted in ((found_gate, gate), (found_up, up)):
            assert torch.equal(found.q, wanted.q) and torch.equal(found.scale, wanted.scale)
        assert torch.equal(torch.cat(list(found_down.q), dim=1), down.q)
        assert torch.equal(torch.cat(list(found_down.scale), dim=1), down.scale)
        other = spread.layers[index].mlp
        assert isinstance(other, WholeDraftMLP)
        assert torch.equal(other.gate_up, torch.cat([values(gate), values(up)]).T)
        assert torch.equal(other.down, values(down).T)
        assert torch.equal(layer.qkv, whole.layers[index].qkv)
        assert torch.equal(layer.out, whole.layers[index].out)
    assert torch.equal(packed.fc, whole.fc)


@pytest.mark.parametrize("rows", [1, 5, 13])
@pytest.mark.parametrize("part", [32, 96])
def test_parts_add_up_to_the_mlp(monkeypatch: pytest.MonkeyPatch, rows: int, part: int) -> None:
    """Also where rows are multiplied a few at a time."""
    monkeypatch.setattr(draft_int4, "ROWS", 8)
    torch.manual_seed(rows)
    mlp, weights = random_mlp(64, 96, part)
    normed = torch.randn(rows * 4, 64)
    found = mlp.partial(load_ops(CPU), normed)
    torch.testing.assert_close(found.double(), by_float64(normed, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("requests", [1, 5])
def test_the_kernel_multiplies_the_parts(requests: int) -> None:
    """Tiles of 8, 16 and 32 rows; a row's bits are the same in all of them."""
    torch.manual_seed(requests)
    mlp, weights = random_mlp(64, 192, 64)
    ops: Ops = CudaOps(CPU, simt_loader(seed=requests))
    normed = torch.randn(requests * 8, 64).bfloat16()
    found = mlp.partial(ops, normed)
    wanted = by_float64(normed, weights)
    error = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert found.dtype == torch.bfloat16 and error.max() < 0.01
    assert torch.equal(mlp.partial(ops, normed[:3]), found[:3])


@pytest.mark.usefixtures("parts_of_32")
@pytest.mark.parametrize("form", ["rounded", "packed"])
def test_a_drafter_drafts_as_its_rounded_weights_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr("kdray.model.drafter.mlp_form", lambda *_: form)
    drafter, ops = load(tmp_path, FIELDS, weights="int4")
    rounds = Rounds(drafter, num_requests=2, page_size=4, num_pages=64, seed=3)
    rounds.prefill([6, 9])
    rounds.step([4, 2])
    roots = torch.tensor([11, 12], dtype=torch.int32)
    drafter.propose(rounds.plan([1, 1], [3, 3]), roots)
    tensors = {
        name: rounded(weight) if ".mlp." in name else weight
        for name, weight in draft_tensors(FIELDS).items()
    }
    assert ops.logits is not None
    for r, logits in enumerate(ops.logits.view(2, drafter.depth, -1).double()):
        given = (tables_of(tmp_path), rounds.known[r], int(roots[r]))
        torch.testing.assert_close(
            logits, draft_logits(FIELDS, tensors, *given), atol=1e-4, rtol=1e-4
        )
        whole = draft_logits(FIELDS, draft_tensors(FIELDS), *given)
        assert (logits - whole).abs().max() > 0.01, "nothing was rounded"


def generate(sampling: SamplingParams, **wishes: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Texts, and the accept lengths of each."""
    with LLM(EngineConfig(device="cpu", threads=1, **wishes)) as llm:
        prompts = [
            encode_chat(llm.tokenizer, document.prompt_messages)
            for kind in ("story", "problem")
            for document in held_out_prompts(kind, 3, seed=5)  # type: ignore[arg-type]
        ]
        done = llm.generate(prompts, sampling)
    return [c.token_ids for c in done], [c.accept_lengths for c in done]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_changes_what_is_drafted_and_nothing_that_is_said(temperature: float) -> None:
    sampling = SamplingParams(max_tokens=96, temperature=temperature, seed=3)
    plain, _ = generate(sampling, mode="plain")
    for mode, budget in (("tree", 16), ("chain", 7)):
        texts, lengths = generate(sampling, mode=mode, budget=budget, draft_weights="int4")
        assert texts == plain
        assert max(map(max, lengths)) == 8
        if mode == "chain":
            assert lengths != generate(sampling, mode=mode, budget=budget)[1]


def test_packed_parts_in_an_engine_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_int4, "PART", 320)
    sampling = SamplingParams(max_tokens=24)
    plain, _ = generate(sampling, mode="plain")
    _, by_values = generate(sampling, draft_weights="int4")
    monkeypatch.setattr("kdray.model.drafter.mlp_form", lambda *_: "packed")
    texts, lengths = generate(sampling, draft_weights="int4")
    assert texts == plain and lengths == by_values


@pytest.mark.parametrize(
    ("inner", "part"),
    [(18432, 2048), (640, 640), (9728, 1216), (3104, 3104), (131072, 4096), (32, 32)],
)
def test_parts_are_whole_tiles_and_few(inner: int, part: int) -> None:
    assert part_of(inner) == part
    assert part % 32 == 0 and inner % part == 0 and inner // part <= 32


@pytest.mark.parametrize(
    ("wish", "dtype", "device", "form"),
    [
        ("auto", torch.bfloat16, "cuda", "whole"),
        ("int4", torch.bfloat16, "cuda", "packed"),
        ("int4", torch.float32, "cuda", "rounded"),
        ("int4", torch.bfloat16, "cpu", "rounded"),
    ],
)
def test_a_wish_is_kept_packed_where_there_is_a_kernel(
    wish: DraftWeightType, dtype: torch.dtype, device: str, form: str
) -> None:
    assert mlp_form(wish, dtype, torch.device(device)) == form


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_sizes_that_cut_a_group_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_drafter(tmp_path, draft_config(**{name: 48}))
    config = DFlashConfig.from_folder(folder)
    with pytest.raises(ConfigError, match=f"{name} 48 is no multiple of 32.*leave draft_weights"):
        load_weights(folder, config, torch.float32, CPU, "packed")
    load_weights(folder, config, torch.float32, CPU)


def test_groups_that_fit_are_taken(tmp_path: Path) -> None:
    check_groups(DFlashConfig.from_folder(write_drafter(tmp_path, FIELDS)))


def test_another_wish_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_weights must be one of auto, int4, got 'int8'"):
        EngineConfig(draft_weights="int8")  # type: ignore[arg-type]
