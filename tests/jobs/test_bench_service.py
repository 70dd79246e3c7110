"""jobs/bench_service.py against scripted servers: what it counts, and what it does about errors."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import bench_service
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from service_client import Timing, accept_length, parse_metrics
from service_prompts import Ask, file_prompts, synthetic_prompts

from kdray.errors import KdrayError
from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import build_app
from tests.serve.fakes import FakeEngine, steps
from tests.serve.http import served


def vllm_like(fail_every: int = 0) -> FastAPI:
    """A server that knows nothing of kdray: no /health page, usage in a last chunk only."""
    app, asked = FastAPI(), 0

    @app.get("/v1/models")
    def models() -> Any:
        return {"data": [{"id": "other"}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:  # in the loop: threads would share the count
        nonlocal asked
        assert body["model"] == "other"
        asked += 1
        if fail_every and asked % fail_every == 0:
            return JSONResponse({"error": {"message": "busy"}}, 429)
        deltas = [{"role": "assistant"}, {"content": "a"}, {"content": "bc"}]
        chunks: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
        lines = [": hello", *(f"data: {json.dumps(c)}" for c in chunks), "data: [DONE]"]
        return StreamingResponse(iter([f"{line}\n\n" for line in lines]))

    return app


def run(url: str, *options: str, out: Path | None = None) -> int:
    command = ["--url", url, "--requests", "6", "--max-tokens", "16", "--concurrencies", *options]
    return bench_service.main([*command, *(["--out", str(out)] if out else [])])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.glob("service-*.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_kdray_s_own_endpoint(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = build_app(FakeEngine(steps("he", "yo")), tokenizer, "fake")
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "hi"}')
    options = ("1", "3", "--rates", "500", "--prompts", str(prompts))
    with served(app) as url:
        assert run(f"{url}/v1", *options, out=tmp_path) == 0
    rows = rows_of(tmp_path)
    params = [(r["params"]["mode"], r["params"]["concurrency"], r["params"]["rate"]) for r in rows]
    assert params == [("closed", 1, 0.0), ("closed", 3, 0.0), ("open", 0, 500.0)]
    for row in rows:
        metrics, samples = row["metrics"], row["samples"]
        assert metrics["tokens"] == 6 * 4 and metrics["errors"] == 0
        assert len(samples["ttft_ms_p50"]) == len(samples["tpot_ms_p50"]) == 6
        assert metrics["ttft_ms_p99"] == max(samples["ttft_ms_p50"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["params"] for row in last["rows"]] == [row["params"] for row in rows]


def test_another_server_s_wire_format_with_errors(tmp_path: Path) -> None:
    with served(vllm_like(fail_every=3)) as url:  # its first request is the check's
        assert run(url, "2", "--label", "other", out=tmp_path) == 0
    [row] = rows_of(tmp_path)
    assert row["metrics"]["errors"] == 2 and row["metrics"]["tokens"] == 4 * 3
    assert row["metrics"]["accept_length_mean"] is None
    assert len(row["samples"]["tpot_ms_p50"]) == 4


def test_a_service_that_is_not_well_is_said_at_once(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(steps("hi"))
    engine.cause = "rank 1 died"
    with served(build_app(engine, tokenizer, "fake")) as url:
        assert run(url, "1") == 1
    assert "/health says 503" in capsys.readouterr().err
    assert run("http://127.0.0.1:1", "1") == 1
    assert "does not answer" in capsys.readouterr().err


def test_an_interruption_keeps_the_rows_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_row = bench_service.row

    async def row(target: Any, asks: Any, load: Any, params: Any, record: Any) -> None:
        if params["concurrency"] == 2:
            raise KeyboardInterrupt
        await whole_row(target, asks, load, params, record)

    monkeypatch.setattr(bench_service, "row", row)
    with served(vllm_like()) as url:
        assert run(url, "1", "2", "4", out=tmp_path) == 130
    assert [row["params"]["concurrency"] for row in rows_of(tmp_path)] == [1]
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]) == 1


def test_a_row_in_which_everything_failed_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with served(vllm_like(fail_every=1)) as url:
        assert run(url, "1") == 1
    assert "a first request failed (429)" in capsys.readouterr().err


def test_open_loops_do_not_wait_for_answers() -> None:
    """Twenty requests whose answers come only when all of them are there."""
    here, all_here = 0, asyncio.Event()

    class Target:
        async def ask(self, path: str, body: dict[str, Any], due: float) -> Timing:
            nonlocal here
            here += 1
            if here == 20:
                all_here.set()
            await all_here.wait()
            return Timing(due=due)

    load = bench_service.opened(10_000.0, random.Random(3))
    timings = asyncio.run(load(Target(), [Ask("/", {})] * 20))  # type: ignore[arg-type]
    assert [t.due for t in timings] == sorted(t.due for t in timings) and len(timings) == 20


def test_accept_length_by_anybody_s_names() -> None:
    page = '# HELP x y\nkdray_accept_length_sum{a="1"} 6\nkdray_accept_length_sum{a="2"} 4\n'
    assert parse_metrics(page) == {"kdray_accept_length_sum": 10.0}
    own = {"kdray_accept_length_sum": 10.0, "kdray_accept_length_count": 4.0}
    assert accept_length({}, own) == 2.5 and accept_length(own, own) is None
    drafts, accepted = (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    assert accept_length({drafts: 1.0}, {drafts: 5.0, accepted: 8.0}) == 3.0
    assert accept_length({}, {"sglang:spec_accept_length": 3.2}) == 3.2


def test_prompts_of_a_file_and_of_a_length(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    body = {"model": "x", "prompt": "b", "max_tokens": 9}
    openai = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps(openai))
    asks = file_prompts(path, {"max_tokens": 5}).take(3)
    message = {"role": "user", "content": "a"}
    assert asks[0].body == {"max_tokens": 5, "messages": [message]} == asks[2].body
    assert asks[1].body == {"max_tokens": 9, "prompt": "b"}
    [ask] = synthetic_prompts("7:3", 1, 1, {}).take(1)
    assert len(ask.body["prompt"]) == 7 and ask.body["ignore_eos"] and ask.body["max_tokens"] == 3
    with pytest.raises(KdrayError, match="IN:OUT"):
        synthetic_prompts("7", 1, 1, {})


@pytest.mark.parametrize(("percent", "value"), [(50, 50.0), (99, 99.0), (100, 100.0), (0, 1.0)])
def test_percentiles_are_values_that_occurred(percent: int, value: float) -> None:
    assert bench_service.percentile([float(n) for n in range(100, 0, -1)], percent) == value
    assert bench_service.percentile([], percent) is None


@pytest.mark.parametrize(
    "words", [["--requests", "0"], ["--concurrencies", "8", "0"], ["--rates", "-1"]]
)
def test_loads_of_nothing_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_service.parse(words)
    assert "want numbers above 0" in capsys.readouterr().err
