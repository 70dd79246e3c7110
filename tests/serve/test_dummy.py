"""A model of a config.json alone, behind a real endpoint, over two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.llm import LLM
from kdray.serve import applications
from tests.model import dummy_folders
from tests.serve.http import events, free_port

PROMPT = [300 + 7 * n for n in range(40)]
LENGTH = 24


@pytest.fixture(scope="module")
def wishes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, drafter = dummy_folders.write(tmp_path_factory.mktemp("dummy"))
    return {
        "model": str(target), "drafter": str(drafter), "load_format": "dummy", "device": "cpu",
        "threads": 1, "max_requests": 2, "max_model_len": 256,
    }  # fmt: skip


@pytest.fixture(scope="module")
def address(ray_cluster: None, wishes: dict[str, Any]) -> Iterator[str]:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = applications.build(wishes | {"tp": 2, "served_name": "k26"})
    serve.run(app, name="kdray-dummy", route_prefix="/")
    yield f"http://127.0.0.1:{port}/v1"
    serve.delete("kdray-dummy")
    serve.shutdown()


def one_rank(wishes: dict[str, Any]) -> tuple[Path, str]:
    """What one rank in this process says plainly, and its folder."""
    with LLM(EngineConfig(**wishes | {"mode": "plain"})) as llm:
        [said] = llm.generate([PROMPT], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        return llm.facts.target, said.text


def test_token_prompts_stream_the_text_that_one_rank_says(
    address: str, wishes: dict[str, Any]
) -> None:
    folder, expected = one_rank(wishes)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{address}/completions", json=body | {"stream": True}, timeout=120)
    *steps, last = (chunk["choices"][0] for chunk in events(answer))
    assert all(step["text"] for step in steps) and last["finish_reason"] == "length"
    assert "".join(step["text"] for step in (*steps, last)) == expected
    assert len(steps) > 1 and len(set(expected)) > 5


def test_a_chat_is_answered(address: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{address}/chat/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["model"] == "k26" and answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens"] == len("user: Hi\nassistant: ")
