"""Runs the lines of a batch on a gang: shown as they come, or kept in a journal."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from batch_journal import Journal
from batch_lines import Answer, Line, record_of
from offline import Offline, offline

from kdray.actors.placement import Placement
from kdray.config import EngineConfig
from kdray.errors import KdrayError

QUIET_PERIOD_S = 10.0  # between two lines of progress where stderr is a log
Ask = Callable[[Line], Awaitable[Answer]]


def run_shown(
    config: EngineConfig, placement: Placement, lines: Sequence[Line], arguments: argparse.Namespace
) -> int:
    """Every text on stdout, in the prompts' order, a single one as it comes; then the figures."""
    quiet = arguments.json

    async def run() -> tuple[dict[int, Answer], dict[str, Any]]:
        async with offline(config, placement, arguments.served_name) as engine:
            figures = Figures(await engine.stats())
            if len(lines) == 1 and lines[0].custom_id is None and not quiet:
                answers = {lines[0].number: await engine.stream(lines[0], _show)}
            else:
                answers = await _answers(engine, lines, _window(config))
            return answers, figures.report(await engine.stats())

    answers, report = asyncio.run(run())
    _show_all(lines, answers, report, quiet=quiet)
    return _status([(line.number, answers[line.number].error) for line in lines], len(lines), "")


def run_journalled(
    config: EngineConfig,
    placement: Placement,
    lines: Sequence[Line],
    journal: Journal,
    arguments: argparse.Namespace,
) -> int:
    """Run what the journal lacks, then put all into the output."""
    missing = [line for line in lines if line.number not in journal.done]
    if len(missing) < len(lines):
        print(f"{len(lines) - len(missing)} of {len(lines)} lines were done before",
              file=sys.stderr, flush=True)  # fmt: skip
    progress = Progress(len(lines), len(lines) - len(missing))

    async def run() -> dict[str, Any]:
        async with offline(config, placement, arguments.served_name) as engine:
            figures = Figures(await engine.stats())
            async for line, answer in in_window(missing, _kept(engine), _window(config)):
                journal.add(line.number, record_of(line, answer))
                progress.add(answer)
            return figures.report(await engine.stats())

    try:
        report = asyncio.run(run()) if missing else {}
    finally:
        progress.close(len(journal.done))
    failed = [(n, _error_of(journal.record(n))) for n in journal.done]
    journal.finish([line.number for line in lines])
    counts = {
        "lines": len(lines),
        "run_now": len(missing),
        "failed": sum(e is not None for _, e in failed),
    }
    if arguments.json:
        print(json.dumps(counts | report))
    else:
        print(f"{len(lines)} lines in {arguments.output}, {len(missing)} of them run now")
        if report:
            print(table(report))
    return _status(failed, len(lines), f"; the others are in {arguments.output}")


async def in_window(
    lines: Iterable[Line], ask: Ask, window: int
) -> AsyncIterator[tuple[Line, Answer]]:
    """Each line with its answer, as they end; `window` of them are open at any time."""
    coming = iter(lines)
    running: dict[asyncio.Future[Answer], Line] = {}
    try:
        while True:
            while len(running) < window and (line := next(coming, None)) is not None:
                running[asyncio.ensure_future(ask(line))] = line
            if not running:
                return
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in ended:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _kept(engine: Offline) -> Ask:
    """Answers worth keeping: where the engine is gone the line must run again, another time."""

    async def ask(line: Line) -> Answer:
        answer = await engine.answer(line)
        if answer.status >= 500 and (cause := engine.healthy()) is not None:
            raise KdrayError(f"{cause}; start again to go on")
        return answer

    return ask


async def _answers(engine: Offline, lines: Sequence[Line], window: int) -> dict[int, Answer]:
    ask = _kept(engine)
    return {line.number: answer async for line, answer in in_window(lines, ask, window)}


def _window(config: EngineConfig) -> int:
    """As many as run at the same time, and as many that wait to take their places."""
    return 2 * config.max_requests


class Figures:
    """What the engine did between two looks at its counters."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._before = stats
        self._start = time.perf_counter()

    def report(self, stats: dict[str, Any]) -> dict[str, Any]:
        seconds = time.perf_counter() - self._start
        before = self._before
        lengths = Counter(stats["accept_lengths"]) - Counter(before["accept_lengths"])
        generated = stats["generated_tokens"] - before["generated_tokens"]
        steps = stats["steps"] - before["steps"]
        return {
            "tokens_per_s": generated / seconds,
            "generated_tokens": generated,
            "steps": steps,
            "target_forwards": steps,
            "accept_length_mean": mean(lengths),
            "accept_length_histogram": {str(n): lengths[n] for n in sorted(lengths)},
            "stage_ms": {
                verb: 1000 * (total - before["stage_seconds"].get(verb, 0.0))
                for verb, total in stats["stage_seconds"].items()
            },
        }


def mean(lengths: Counter[int]) -> float | None:
    """Mean accept length; None where nothing was drafted."""
    count = lengths.total()
    return sum(n * times for n, times in lengths.items()) / count if count else None


def table(report: dict[str, Any]) -> str:
    accept, stages = report["accept_length_mean"], report["stage_ms"]
    total = sum(stages.values()) or 1.0
    shares = "  ".join(f"{verb} {100 * ms / total:.0f}%" for verb, ms in stages.items())
    return (
        f"  tokens         {report['generated_tokens']}\n"
        f"  tokens/s       {report['tokens_per_s']:.0f}\n"
        f"  steps          {report['steps']}\n"
        f"  accept length  {f'{accept:.2f}' if accept else '- (plain decoding)'}\n"
        f"  time           {shares}"
    )


class Progress:
    """A bar where stderr is a terminal, else a line now and then; `done` lines came before."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._done, self._before = done, done
        self._tokens = 0
        self._start = time.perf_counter()
        self._said_at = self._start
        self._bar = sys.stderr.isatty()

    def add(self, answer: Answer) -> None:
        self._done += 1
        self._tokens += answer.body.get("usage", {}).get("completion_tokens", 0)
        now = time.perf_counter()
        if self._bar:
            bar = "#" * (20 * self._done // self._total)
            print(f"\r[{bar:<20}] {self._state(now)}\033[K", end="", file=sys.stderr, flush=True)
        elif now - self._said_at >= QUIET_PERIOD_S:
            self._said_at = now
            print(self._state(now), file=sys.stderr, flush=True)

    def close(self, done: int) -> None:
        """`done`: lines in the journal."""
        start = "\n" if self._bar else ""
        print(f"{start}{done} of {self._total} lines are done", file=sys.stderr, flush=True)

    def _state(self, now: float) -> str:
        seconds = now - self._start
        left = seconds / (self._done - self._before) * (self._total - self._done)
        return (
            f"{self._done}/{self._total} lines, {self._tokens} tokens, "
            f"{self._tokens / seconds:.0f} tokens/s, {left:.0f} s left"
        )


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _show_all(
    lines: Sequence[Line], answers: dict[int, Answer], report: dict[str, Any], *, quiet: bool
) -> None:
    ordered = [answers[line.number] for line in lines]
    if quiet:
        texts = {"texts": [a.text for a in ordered], "token_ids": [[*a.token_ids] for a in ordered]}
        print(json.dumps(report | texts))
        return
    for line, answer in zip(lines, ordered, strict=True):
        if len(lines) > 1 or line.custom_id is not None:
            print(f"--- line {line.number}\n{answer.text}")
    print(f"\n\n{table(report)}")


def _error_of(record: dict[str, Any]) -> str | None:
    """What a written record says of its failure."""
    response = record.get("response")
    if isinstance(response, dict) and "custom_id" in record:
        failed = response["status_code"] != 200
        return str(response["body"]["error"]["message"]) if failed else None
    error: str | None = record.get("error") if record.get("text") is None else None
    return error


def _status(errors: Sequence[tuple[int, str | None]], total: int, others: str) -> int:
    failed = sorted((number, error) for number, error in errors if error is not None)
    if not failed:
        return 0
    number, error = failed[0]
    if total == 1:
        raise KdrayError(error)
    raise KdrayError(f"{len(failed)} of {total} lines failed, first line {number}: {error}{others}")
