"""Latents kept in fp8: every way to decode still says the same, and it says nearly what bf16 says.

Equality is tested with a model in float32, whose sums do not depend on a step's rows: what is kept
in 8 bits is the same either way, since a row's bytes are a function of its token and its past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.driver.driver import Driver
from kdray.engine import assemble, build_verifier, resolve
from kdray.errors import ConfigError
from kdray.kernels.latent_rows import FP8, RowFormat
from kdray.kernels.ops import load_ops
from kdray.verifier.local_group import LocalGroup
from tests.harness import drain, model_config, outputs_of, run, submit
from tests.model import tiny
from tests.oracle_drafter import OracleDrafter

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=11)
PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [10] * 33, list(range(3, 40)), [11], [90, 2, 40] * 5]


@pytest.fixture(scope="module", params=["kimi", "deepseek"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_plain(tmp_path_factory.mktemp(request.param), request.param)


def decode(
    config: EngineConfig, sampling: SamplingParams, texts: Sequence[Sequence[int]] | None = None
) -> tuple[list[list[int]], Driver]:
    """texts: plain decoding's, which a drafter is then mostly right about."""
    facts = resolve(replace(config, drafter="none"))
    model = facts.model
    row = RowFormat.of(model.kv_lora_rank, model.qk_rope_head_dim, FP8)
    facts = replace(facts, kv_row=row)
    ops = load_ops("cpu")
    verifier = build_verifier(config, facts, ops)
    assert {layer.dtype for layer in verifier.cache.layers} == {torch.uint8}
    drafter = None
    if texts is not None:
        sequences = {f"r{n}": [*PROMPTS[n], *text] for n, text in enumerate(texts)}
        drafter = OracleDrafter(
            sequences, depth=7, candidates=8, vocab_size=model.vocab_size, accuracy=0.6
        )
    engine = assemble(config, facts, ops, drafter, LocalGroup(verifier))
    requests = submit(engine, PROMPTS, sampling)
    drain(engine.driver)
    return outputs_of(requests), engine.driver


@cache
def plain(folder: Path, sampling: SamplingParams) -> list[list[int]]:
    config = model_config(folder, mode="plain", page_size=1, max_requests=1)
    return decode(config, sampling)[0]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "wishes",
    [
        {"mode": "tree", "budget": 16, "page_size": 16, "max_requests": 4},
        {"mode": "tree", "budget": 5, "page_size": 4, "max_requests": 1},
        {"mode": "chain", "budget": 7, "page_size": 16, "max_requests": 6},
        {"mode": "plain", "page_size": 16, "max_requests": 6},
        {"mode": "tree", "budget": 8, "page_size": 4, "num_pages": 26, "max_requests": 6},
        {"mode": "tree", "budget": 8, "page_size": 2, "prefill_chunk": 5, "max_requests": 3},
    ],
    ids=["tree", "small tree", "chain", "plain", "preempted", "prompts in pieces"],
)
def test_every_way_says_the_same(
    folder: Path, sampling: SamplingParams, wishes: dict[str, object]
) -> None:
    texts = None if wishes["mode"] == "plain" else plain(folder, sampling)
    outputs, driver = decode(model_config(folder, **wishes), sampling, texts)
    assert outputs == plain(folder, sampling)
    if texts is not None:
        assert max(driver.counters.accept_lengths) > 2


def test_rows_in_fp8_are_what_is_read(folder: Path) -> None:
    """Random weights notice 4 bits of mantissa: the texts are not those of an exact cache."""
    exact, _ = run(model_config(folder, mode="plain"), PROMPTS, GREEDY)
    assert exact != plain(folder, GREEDY)


def test_a_model_in_float32_keeps_its_kv_so(folder: Path) -> None:
    for kv_dtype in ("fp8", "bf16"):
        with pytest.raises(ConfigError, match="--dtype bfloat16"):
            resolve(model_config(folder, kv_dtype=kv_dtype))
    with pytest.raises(ConfigError, match="auto, bf16, fp8"):
        EngineConfig(kv_dtype="int8")  # type: ignore[arg-type]


def test_what_a_rank_keeps(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), drafter="none", device="cpu", dtype="bfloat16", kv_memory_bytes=1 << 16
    )
    kept = {
        kv_dtype: resolve(replace(config, kv_dtype=kv_dtype))  # type: ignore[arg-type]
        for kv_dtype in ("auto", "bf16", "fp8")
    }
    assert kept["auto"] == kept["bf16"]
    assert kept["bf16"].kv_row == RowFormat(40, torch.bfloat16)
    assert kept["fp8"].kv_row == RowFormat(80, torch.uint8)
