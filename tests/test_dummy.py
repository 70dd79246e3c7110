"""An engine of dummy weights: it says so, and says the same however and whenever it is started."""

from __future__ import annotations

import logging

import pytest

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.llm import LLM, Completion

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=5)


def said(**wishes: object) -> Completion:
    with LLM(EngineConfig(device="cpu", threads=1, **wishes)) as llm:  # type: ignore[arg-type]
        [completion] = llm.generate(["Once upon a time"], SAMPLING)
        return completion


def test_the_demo_s_shapes_in_every_mode(caplog: pytest.LogCaptureFixture) -> None:
    """Its own tokenizer; tree and plain decoding, each started anew, say the same."""
    with caplog.at_level(logging.INFO):
        tree = said(load_format="dummy")
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == "dummy weights: demo runs on random numbers, its text means nothing"
    plain = said(load_format="dummy", mode="plain")
    assert tree.token_ids == plain.token_ids and len(set(tree.token_ids)) > 8
    assert tree.accept_lengths and not plain.accept_lengths
    trained = said()
    assert trained.token_ids != tree.token_ids
