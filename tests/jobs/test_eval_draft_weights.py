"""jobs/eval_draft_weights.py: rounding as it is named, bytes, the comparison, and a gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import eval_draft_weights
import pytest
import torch
from eval_draft_weights import gained, kept_drafters, rounded, stored_bytes
from safetensors.torch import load_file

from kdray.kernels.moe_layout import Int4
from kdray.model import dflash_weights, draft_int4
from kdray.model.dflash_config import DFlashConfig
from kdray.model.weight_bytes import drafter_bytes

FEW = ["--device", "cpu", "--threads", "1", "--per-kind", "4", "--max-tokens", "64"]
ONE_WAY = ["--temperatures", "0", "--budgets", "16"]


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    return rows


def test_four_bits_are_those_of_the_product() -> None:
    weight = torch.randn(64, 96)
    assert torch.equal(rounded(weight, 4), draft_int4.rounded(weight))


def test_eight_bits_are_the_nearest_of_256_steps() -> None:
    weight = torch.randn(8, 64)
    kept = rounded(weight, 8)
    scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 127.5).bfloat16().float()
    levels = torch.arange(-128, 128) * scale.repeat_interleave(32, dim=-1)[..., None]
    assert torch.equal((kept - weight).abs(), (levels - weight[..., None]).abs().amin(-1))


def test_copies_are_rounded_where_they_say(tmp_path: Path) -> None:
    whole, int8, _, everywhere = (
        load_file(kept.folder / "model.safetensors") for kept in kept_drafters(tmp_path)
    )
    for name, weight in whole.items():
        in_mlp, matrix = ".mlp." in name, weight.dim() == 2
        assert torch.equal(int8[name], weight.float()) != in_mlp
        assert torch.equal(everywhere[name], weight.float()) != matrix


def test_bytes_are_those_that_are_planned() -> None:
    config = DFlashConfig.from_folder(eval_draft_weights.KIMI)
    for name, bits, form in (("whole", 16, "whole"), ("int4", 4, "packed")):
        planned = drafter_bytes(config, torch.bfloat16, form)  # type: ignore[arg-type]
        assert stored_bytes(config, name, bits) == planned.total
    assert f"{stored_bytes(config, 'int4 everywhere', 4) / 1e9:.2f}" == "1.96"


def test_a_gain_is_that_of_the_sums() -> None:
    assert gained([10, 20], [10, 20]) == (0.0, 0.0)
    change, error = gained([10, 20], [12, 18])
    assert change == 0.0 and error == pytest.approx(8**0.5 / 30)
    assert gained([10, 20], [5, 10])[0] == 1.0


def test_int4_loses_little_and_changes_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_draft_weights.main([*FEW, *ONE_WAY, "--weights", "whole", "int8", "int4"]) == 0
    ways = [row for row in rows_of(capsys) if "mode" in row["params"]]
    assert [row["params"]["weights"] for row in ways] == 2 * ["whole", "int8", "int4"]
    assert all(row["metrics"]["differing"] == 0 for row in ways)
    assert all(row["metrics"]["accept_length"] > 3 for row in ways)


def test_scales_that_are_off_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(weight: torch.Tensor) -> torch.Tensor:
        kept = draft_int4.int4_of(weight)
        return draft_int4.values(Int4(kept.q, kept.scale.roll(1, dims=-1)))

    monkeypatch.setattr(dflash_weights, "rounded", off)
    assert eval_draft_weights.main([*FEW, *ONE_WAY, "--weights", "whole", "int4"]) == 1
    *_, int4 = rows_of(capsys)
    assert int4["metrics"]["differing"] == 0 and int4["metrics"]["change"] < -0.03


def test_nothing_stands_beside_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        eval_draft_weights.parse(["--weights", "int4"])
    assert "--weights needs whole" in capsys.readouterr().err
