"""The check of full widths at tiny ones: it passes where all is well, and sees what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import check_full_width
import pytest
import torch
from dequantised import load_reference
from full_width_rank import layer_findings, logit_findings, save_logits, steps_of
from layer_errors import Blur, size_of_error

from kdray.kernels.ops import load_ops
from kdray.model.moe import MoE
from kdray.model.target import TargetModel
from tests.jobs.wide_cases import EXPERTS, SET, TOKENS, write_wide


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> TargetModel:
    return load_reference(folder / "target", torch.device("cpu"), rounded=True)


@pytest.fixture
def model(folder: Path) -> TargetModel:
    return TargetModel.load(folder / "target", ops=load_ops("cpu"))


@pytest.mark.parametrize("dtype, ranks", [("float32", 2), ("bfloat16", 1)])
def test_all_is_well(
    dtype: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--layers", "3", "--experts", "16", "--float32-experts", "16", "--set", SET]
    load = ["--requests", "3", "--tokens", "12", "--threads", "2"]
    what = ["--device", "cpu", "--ranks", str(ranks), "--dtypes", dtype]
    assert check_full_width.main([*what, *sizes, *load, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(row["metrics"].get("good", 1.0) for row in rows)
    parts = {row["params"].get("part") for row in rows}
    ends = {f"logits, {n} rank{'s' * (n > 1)}" for n in range(1, ranks + 1)}
    assert parts == {"attention", "mlp", "head", None} | ends
    pairs = [row["params"]["one"] for row in rows if "one" in row["params"]]
    ways = ["plain, 1 rank", "tree, 1 rank", "tree, 2 ranks"]
    assert pairs == ways[: 1 + ranks]
    assert all(
        row["metrics"]["accept_length"] > 1
        for row in rows
        if row["params"].get("way", "plain").startswith("tree")
    )
    [written] = tmp_path.glob("full_width-*.json")
    assert len(json.loads(written.read_text())["rows"]) == len(rows)


def test_more_ranks_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = torch.cuda.device_count() + 1
    assert check_full_width.main(["--ranks", str(ranks)]) == 1
    assert "give --ranks" in capsys.readouterr().err


def bad_parts(model: TargetModel, reference: TargetModel) -> set[tuple[object, object]]:
    steps = steps_of(TOKENS, torch.device("cpu"))
    found = layer_findings(model, reference, steps)
    return {(f.params["layer"], f.params["part"]) for f in found if not f.good}


def test_a_wrong_expert_shows_in_its_layer_alone(
    model: TargetModel, reference: TargetModel
) -> None:
    assert not bad_parts(model, reference)
    mlp = model.layers[2].mlp
    assert isinstance(mlp, MoE)
    mlp.down[5, :32] *= 1.01  # a scale of one group in a hundred
    assert bad_parts(model, reference) == {(2, "mlp")}


def test_a_wrong_head_shows(model: TargetModel, reference: TargetModel) -> None:
    wrong = replace(model, head=model.head * 1.001)
    assert bad_parts(wrong, reference) == {(3, "head")}


def test_wrong_attention_shows(model: TargetModel, reference: TargetModel) -> None:
    attention = model.layers[1].attention
    layer = replace(model.layers[1], attention=replace(attention, scale=attention.scale * 1.001))
    wrong = replace(model, layers=(model.layers[0], layer, model.layers[2]))
    assert bad_parts(wrong, reference) == {(1, "attention")}


def test_a_wrong_choice_of_experts_shows(model: TargetModel, reference: TargetModel) -> None:
    mlp = model.layers[2].mlp
    assert isinstance(mlp, MoE)
    router = mlp.router._replace(weight=mlp.router.weight.roll(1, dims=1))
    layer = replace(model.layers[2], mlp=mlp._replace(router=router))
    wrong = replace(model, layers=(*model.layers[:2], layer))
    steps = {"one row": steps_of(TOKENS, torch.device("cpu"))["prompts"]}
    bad = [f for f in layer_findings(wrong, reference, steps) if not f.good]
    assert [f.params["part"] for f in bad] == ["mlp"]
    assert bad[0].metrics["swap_margin"] > 0.1 and bad[0].metrics["swapped"] > 200


def test_logits_are_compared_by_the_experts_of_the_model(
    model: TargetModel, reference: TargetModel, tmp_path: Path
) -> None:
    """Those of several ranks too, as they were saved."""
    path = tmp_path / "logits"
    steps = steps_of(TOKENS, torch.device("cpu"))
    save_logits(replace(model, head=model.head * 1.001), TOKENS, path)
    found = list(logit_findings(model, reference, steps, path))
    assert [f.good for f in found] == [True] * 4 + [False] * 4


def test_halves_are_blurred_by_what_is_allowed_to_each() -> None:
    blur, x = Blur((0.1, 0.01), torch.Generator().manual_seed(0)), 3 * torch.ones(8, 4096)
    x[1] = 7
    for size in (0.1, 0.01, 0.1):
        found = size_of_error(blur.all_reduce(x), x)
        assert abs(found.relative / size - 1) < 0.05 and found.worst_row < 1.1 * size


def test_every_expert_has_tokens(reference: TargetModel) -> None:
    tokens = torch.tensor(TOKENS)
    x = reference.ops.rms_norm(reference.embed(tokens), reference.layers[1].mlp_norm)
    mlp = reference.layers[1].mlp
    assert not isinstance(mlp, MoE)
    expert = mlp.router.route(x).expert  # type: ignore[union-attr]
    counts = torch.bincount(expert.flatten(), minlength=EXPERTS)
    assert counts.sum() == 8 * EXPERTS and counts.min() >= 6


def test_tokens_in_play_win(reference: TargetModel) -> None:
    steps = steps_of(TOKENS, torch.device("cpu"))
    caches = [torch.zeros(5 * 24 * 16, reference.kv_width) for _ in reference.layers]
    hidden = reference.forward(steps["prompts"], caches).hidden
    best = reference.logits(hidden).argmax(1)
    in_play = torch.isin(best, torch.tensor(TOKENS)).float().mean()
    assert in_play > 0.95 and len(best.unique()) > 8
