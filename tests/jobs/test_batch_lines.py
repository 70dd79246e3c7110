"""Lines of a batch: read, asked through the endpoint's own code, written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from batch_lines import Answer, Line, prompt_lines, read_lines, record_of
from batch_run import in_window
from offline import Offline

from kdray.errors import KdrayError
from kdray.model.tokenizer import Tokenizer
from tests.serve.fakes import FakeEngine, steps

OPTIONS = {
    "max_tokens": 16, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 5, "ignore_eos": False,
}  # fmt: skip


def lines_of(tmp_path: Path, *values: Any, raw: bool = False) -> list[Line]:
    path = tmp_path / "in.jsonl"
    text = "\n".join(v if isinstance(v, str) else json.dumps(v) for v in values)
    path.write_text(text, encoding="utf-8")
    return read_lines(path, OPTIONS, raw=raw)


def openai_line(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def answers(engine: FakeEngine, tokenizer: Tokenizer, lines: list[Line]) -> list[Answer]:
    offline = Offline(engine, tokenizer, "fake")

    async def run() -> list[Answer]:
        return [await offline.answer(line) for line in lines]

    return asyncio.run(run())


def test_lines_keep_their_numbers_and_draw_with_seeds_of_their_own(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b\u2028c"}]
    lines = lines_of(tmp_path, {"prompt": "a"}, "", {"messages": chat, "id": 7})
    assert [(line.number, line.body["seed"]) for line in lines] == [(1, 5), (3, 7)]
    assert lines[1].body["messages"] == chat and lines[1].source["id"] == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "line 2 is not JSON"),
        ([1], 'line 2 needs a "prompt"'),
        ({"prompt": 7}, r"line 2: messages\[0\].content must be a string"),
        ({"messages": []}, "line 2: "),
        (openai_line("a"), "line 2 has the custom_id 'a' of line 1"),
        (openai_line("b", stream=True), "line 2: a batch cannot stream"),
        (openai_line("b") | {"url": "/v1/embeddings"}, "line 2: url must be"),
        (openai_line("b") | {"method": "GET"}, "line 2: method must be POST"),
        (openai_line("b") | {"body": None}, "line 2: body must be an object"),
        ({"custom_id": 3}, "line 2: custom_id must be a string"),
    ],
)
def test_a_wrong_line_is_named_before_anything_runs(
    tmp_path: Path, value: Any, message: str
) -> None:
    with pytest.raises(KdrayError, match=message):
        lines_of(tmp_path, openai_line("a"), value)


def test_an_empty_prompt_is_refused_where_it_is_raw_text_however_it_is_given(
    tmp_path: Path,
) -> None:
    with pytest.raises(KdrayError, match="line 1: prompt must be a string, not empty"):
        prompt_lines([""], OPTIONS, raw=True)
    with pytest.raises(KdrayError, match="line 1: prompt must be a string, not empty"):
        lines_of(tmp_path, {"prompt": ""}, raw=True)
    assert (
        prompt_lines([""], OPTIONS, raw=False)[0].body == lines_of(tmp_path, {"prompt": ""})[0].body
    )


def test_a_line_of_openai_s_is_answered_as_openai_does(
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    [good, bad] = lines_of(
        tmp_path,
        openai_line("good", prompt="hi", max_tokens=4, model="fake"),
        openai_line("bad", prompt="hi", max_tokens=0),
    )
    [whole, refused] = answers(FakeEngine(steps("he", "y")), tokenizer, [good, bad])
    record = record_of(good, whole)
    assert record["custom_id"] == "good" and record["error"] is None
    assert record["response"]["status_code"] == 200
    assert record["response"]["body"]["choices"][0]["text"] == "hey"
    record = record_of(bad, refused)
    assert record["response"]["status_code"] == 400
    assert record["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_plain_line_keeps_its_members_and_gets_its_tokens(
    tmp_path: Path,
    tokenizer: Tokenizer,
) -> None:
    lines = lines_of(tmp_path, {"prompt": "hi", "id": 1}, {"prompt": "x" * 600}, raw=True)
    [whole, refused] = answers(FakeEngine(steps("he", "yo")), tokenizer, lines)
    assert record_of(lines[0], whole) == {
        "prompt": "hi", "id": 1, "text": "heyo", "token_ids": list(b"heyo"),
        "finish_reason": "length", "accept_length_mean": 2.0,
    }  # fmt: skip
    record = record_of(lines[1], refused)
    assert record["text"] is None and "600 tokens" in record["error"]


def test_a_streamed_answer_equals_a_whole_one(tokenizer: Tokenizer) -> None:
    shown: list[str] = []
    [line] = prompt_lines(["hi"], OPTIONS, raw=False)
    offline = Offline(FakeEngine(steps("he", "y", "o")), tokenizer, "fake")
    streamed = asyncio.run(offline.stream(line, shown.append))
    whole = asyncio.run(offline.answer(line))
    assert "".join(shown) == streamed.text == whole.text == "heyo"
    assert streamed.token_ids == whole.token_ids == list(b"heyo")
    assert record_of(line, streamed) == record_of(line, whole)


def test_a_window_is_never_wider_and_every_line_comes_back_once() -> None:
    open_now, most = 0, 0

    async def ask(line: Line) -> Answer:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(line.number % 3 + 1):
            await asyncio.sleep(0)
        open_now -= 1
        return Answer(status=200, body={"n": line.number})

    async def run() -> list[tuple[int, int]]:
        lines = prompt_lines(["x"] * 20, OPTIONS, raw=True)
        return [(line.number, a.body["n"]) async for line, a in in_window(lines, ask, 4)]

    assert sorted(asyncio.run(run())) == [(n, n) for n in range(1, 21)]
    assert most == 4
