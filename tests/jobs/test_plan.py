from __future__ import annotations

import json
from pathlib import Path

import plan
import pytest

KIMI = Path(__file__).resolve().parents[2] / "jobs" / "kimi_k26"


def run(*options: str) -> int:
    return plan.main(["--model", str(KIMI), *options])


def test_kimi_k26_on_eight_cards(capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--drafter", str(KIMI / "drafter"))
    assert run("--gpu", "RTX PRO 6000", "--tp", "8", *drafting, "--json") == 0
    out = capsys.readouterr().out
    assert "8 x RTX PRO 6000: 71.0 GiB of the target's weights a GPU (71.3 GiB with routers" in out
    [first] = json.loads(out.splitlines()[-1])["plans"]  # all ranks are alike
    assert first["fits"] and first["num_pages"] == first["pages"]
    assert f"KV pages: {first['pages']:,} of 16 tokens ({first['tokens']:,} tokens), all the" in out
    assert sum(first["items"].values()) > first["card_bytes"] - first["room_bytes"]  # parts twice


def test_a_rank_that_drafts_alone_has_a_plan_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--drafter", str(KIMI / "drafter"), "--draft-tp", "1")
    assert run("--gpu", "RTX PRO 6000", "--tp", "8", *drafting, "--json") == 0
    out = capsys.readouterr().out
    first, other = json.loads(out.splitlines()[-1])["plans"]
    assert first["fits"] and first["tokens"] < other["tokens"]
    assert first["num_pages"] == other["num_pages"] == first["pages"] < other["pages"]
    assert f"KV pages: {first['pages']:,} of 16 tokens ({first['tokens']:,} tokens), all the" in out


def test_kimi_k26_is_refused_on_four(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "RTX PRO 6000", "--tp", "4") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rank 0 of 4 does not fit on RTX PRO 6000: it needs 14" in error
    assert "139.9 of weights" in error and error.endswith("tp 8 fits\n")


def test_wider_plans_share_the_drafter_as_wide(capsys: pytest.CaptureFixture[str]) -> None:
    drafting = ("--drafter", str(KIMI / "drafter"), "--draft-tp", "4")
    assert run("--gpu", "RTX PRO 6000", "--tp", "4", *drafting) == 1
    assert capsys.readouterr().err.endswith("tp 8 fits\n")


def test_batch_invariant_rows_in_fp8_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "RTX PRO 6000", "--tp", "8", "--batch-invariant")
    assert run(*words) == 0
    assert run(*words, "--kv-dtype", "fp8") == 1
    assert "batch_invariant is for models in bfloat16" in capsys.readouterr().err


def test_what_cannot_be_split_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "H200", "--tp", "3") == 1
    assert "tp 3 must divide num_attention_heads 64" in capsys.readouterr().err


def test_without_a_gpu_its_name_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run("--tp", "8") == 1
    assert "say which is meant: --gpu 'RTX PRO 6000'" in capsys.readouterr().err


def test_the_demo_fits_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpu", "24 GB"]) == 0
    assert "1 x a card of 24 GB: 0.0 GiB" in capsys.readouterr().out


def test_pages_that_were_asked_for_are_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu", "RTX PRO 6000", "--tp", "8")
    assert run(*given, "--num-pages", "321") == 0
    assert "  KV pages: 321 of 16 tokens, and a spare one" in capsys.readouterr().out
    assert run(*given, "--kv-memory", "2 GiB") == 0
    pages = (2 << 30) // (16 * 61 * (576 * 2 + 16))
    assert f"  KV pages: {pages:,} of 16 tokens, and a spare one" in capsys.readouterr().out
    assert run(*given, "--kv-memory", "80 GB") == 1
    assert "74.51 of KV pages); " in capsys.readouterr().err
    assert run(*given, "--max-model-len", "1000", "--max-requests", "2") == 0
    assert "KV pages: 130 of 16 tokens (2,080 tokens), all that can be of use" in (
        capsys.readouterr().out
    )
