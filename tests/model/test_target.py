"""The target model against transformers' DeepseekV3 on random tiny checkpoints, all fp32."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdray.errors import ConfigError
from kdray.kernels.ops import load_ops
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part, ancestors
from tests.model.tiny import huggingface, save_int4, save_kimi, save_plain

KINDS = ("kimi", "deepseek", "plain_query")
PROMPT = torch.randint(3, 96, (60,), generator=torch.Generator().manual_seed(4)).tolist()
DRAFT = [11, 12, 13, 14, 15, 16]
PARENTS = [0, 0, 1, 1, 2, 4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("target")
    return {kind: save_plain(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> tuple[TargetModel, str]:
    kind: str = request.param
    return TargetModel.load(folders[kind], ops=load_ops("cpu")), kind


def linear_logits(kind: str, tokens: list[int]) -> Tensor:
    """[T, V] of transformers, the whole text at once."""
    with torch.inference_mode():
        output: Tensor = huggingface(kind)(torch.tensor([tokens])).logits[0]
    return output


def tree_logits(kind: str, known: list[int], draft: list[int], parents: list[int]) -> Tensor:
    """[1 + nodes, V] of transformers with a 4-D mask and positions; node 0 is the last known."""
    paths, start = ancestors(parents), len(known) - 1
    size = start + len(paths)
    seen = torch.ones(size, size).tril().bool()
    position = list(range(size))
    for node, path in enumerate(paths):
        seen[start + node, start:] = False
        seen[start + node, [start + other for other in path]] = True
        position[start + node] = start + len(path) - 1
    bias = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        output = huggingface(kind)(
            torch.tensor([known + draft]),
            attention_mask=bias,
            position_ids=torch.tensor([position]),
        )
    result: Tensor = output.logits[0, start:]
    return result


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_prefill_does_not_depend_on_chunks_or_pages(
    model: tuple[TargetModel, str], page_size: int, chunk: int
) -> None:
    target, kind = model
    runner = PagedRunner(target, page_size, num_pages=80)
    text = runner.text(60)
    found = [
        runner.logits(Part(text, PROMPT[start : start + chunk])) for start in range(0, 60, chunk)
    ]
    close(torch.cat(found), linear_logits(kind, PROMPT))


def test_a_chunk_long_enough_to_be_expanded(model: tuple[TargetModel, str]) -> None:
    target, kind = model
    prompt = (PROMPT * 5)[:300]
    runner = PagedRunner(target)
    text = runner.text(300)
    found = [runner.logits(Part(text, prompt[a:b])) for a, b in pairwise([0, 20, 290, 300])]
    close(torch.cat(found), linear_logits(kind, prompt))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tree_equals_the_masked_run_and_every_linear_path(
    model: tuple[TargetModel, str], page_size: int
) -> None:
    target, kind = model
    runner = PagedRunner(target, page_size, num_pages=80)
    text = runner.text(60)
    runner.run(Part(text, PROMPT[:20]))
    found = runner.logits(Part(text, PROMPT[20:21], DRAFT, PARENTS))
    close(found, tree_logits(kind, PROMPT[:21], DRAFT, PARENTS))
    for node, path in enumerate(ancestors(PARENTS)):
        tokens = PROMPT[:21] + [DRAFT[i - 1] for i in sorted(path) if i > 0]
        close(found[node], linear_logits(kind, tokens)[-1])


def test_requests_of_different_kinds_share_a_batch(model: tuple[TargetModel, str]) -> None:
    target, kind = model
    runner = PagedRunner(target)
    decoding, speculating, filling, new = (runner.text(60) for _ in range(4))
    runner.run(Part(decoding, PROMPT[:3]), Part(speculating, PROMPT[:33]))
    runner.run(Part(filling, PROMPT[5:15]))
    found = runner.logits(
        Part(decoding, [40]),
        Part(speculating, [41], DRAFT[:2], [0, 1]),
        Part(filling, PROMPT[15:30]),
        Part(new, [42, 43]),
    )
    close(found[:1], linear_logits(kind, [*PROMPT[:3], 40])[-1:])
    close(found[1:4], linear_logits(kind, [*PROMPT[:33], 41, *DRAFT[:2]])[-3:])
    close(found[4:19], linear_logits(kind, PROMPT[5:30])[-15:])
    close(found[19:], linear_logits(kind, [42, 43]))


def test_features_are_the_tapped_residual_streams(folders: dict[str, Path]) -> None:
    target = TargetModel.load(folders["kimi"], ops=load_ops("cpu"), taps=(1, 0, 2))
    runner = PagedRunner(target)
    output = runner.run(Part(runner.text(60), PROMPT))
    with torch.inference_mode():
        wanted = huggingface("kimi")(torch.tensor([PROMPT]), output_hidden_states=True)
    first, second, last = output.features.split(target.config.hidden_size, dim=-1)
    close(first, wanted.hidden_states[2][0])
    close(second, wanted.hidden_states[1][0])
    # transformers norms its last hidden state
    close(target.final_norm(last), wanted.hidden_states[3][0])
    close(output.hidden, wanted.hidden_states[3][0])


def test_without_taps_features_have_no_columns(model: tuple[TargetModel, str]) -> None:
    runner = PagedRunner(model[0])
    output = runner.run(Part(runner.text(16), PROMPT[:5]))
    assert output.features.shape == (5, 0)


def test_int4_experts_equal_their_dequantised_copy(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    exact = save_int4(tmp_path / "int4", folders["kimi"])
    target = TargetModel.load(tmp_path / "int4", ops=load_ops("cpu"))
    runner = PagedRunner(target)
    found = runner.logits(Part(runner.text(60), PROMPT))
    with torch.inference_mode():
        wanted = exact(torch.tensor([PROMPT])).logits[0]
    close(found, wanted)
    assert (wanted - linear_logits("kimi", PROMPT)).abs().max() > 0.05  # quantising shows


def test_kimi_names_shards_and_plain_names_give_the_same_bits(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    nested = save_kimi(tmp_path / "nested", folders["kimi"])
    sharded = save_plain(tmp_path / "sharded", "kimi", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    results = []
    for folder in (folders["kimi"], nested, sharded):
        runner = PagedRunner(TargetModel.load(folder, ops=load_ops("cpu")))
        results.append(runner.logits(Part(runner.text(60), PROMPT)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_norms_of_the_latents_take_their_own_epsilon(folders: dict[str, Path]) -> None:
    target = TargetModel.load(folders["kimi"], ops=load_ops("cpu"))
    layer = target.layers[0]
    assert layer.attention.latent_norm.eps.item() == pytest.approx(1e-6)
    assert layer.attention_norm.eps.item() == pytest.approx(1e-5)
    target = TargetModel.load(folders["kimi"], ops=load_ops("cpu"), norm_eps_qkv=0.5)
    assert target.layers[0].attention.latent_norm.eps.item() == 0.5
    runner = PagedRunner(target)
    found = runner.logits(Part(runner.text(60), PROMPT))
    assert (found - linear_logits("kimi", PROMPT)).abs().max() > 0.05


def test_bf16_stays_near_fp32(folders: dict[str, Path]) -> None:
    target = TargetModel.load(folders["deepseek"], ops=load_ops("cpu"), dtype=torch.bfloat16)
    runner = PagedRunner(target)
    found = runner.logits(Part(runner.text(60), PROMPT))
    assert found.dtype == torch.float32
    wanted = linear_logits("deepseek", PROMPT)
    # A row whose expert choice flips is far off; most rows are not.
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.median() < 0.05


def test_taps_must_be_layers_of_the_target(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"taps \[3, -1\] are not layers of the target.*has 3"):
        TargetModel.load(folders["kimi"], ops=load_ops("cpu"), taps=(0, 3, -1))
