#!/usr/bin/env python3
"""Offline generation on Ray: prompts in, text out.

    python jobs/generate.py --prompt "Tell a story about Mia and a red kite."
    python jobs/generate.py --input prompts.jsonl --output texts.jsonl --mode tree --budget 16
    ray job submit --working-dir . -- python jobs/generate.py --json --prompt "..."

Lines of --input are {"prompt": TEXT} or {"messages": [..]}. Prompts go through the model's chat
template unless --raw.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kdray.actors.cluster import connect
from kdray.arguments import add_engine_arguments, engine_config
from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.engine import EngineFacts, resolve
from kdray.errors import InvalidRequest, KdrayError
from kdray.model.chat import check_messages, encode_chat
from kdray.model.tokenizer import StreamDecoder, Tokenizer

DEFAULT_PROMPT = "Tell a story about Mia and a red kite."


@dataclass
class Line:
    """One prompt and what has come of it so far."""

    request_id: str
    source: dict[str, Any]
    prompt: tuple[int, ...]
    decoder: StreamDecoder
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        config, sampling = engine_config(arguments), sampling_of(arguments)
        sources = read_sources(arguments)
        if not os.environ.get("RAY_ADDRESS"):  # what a shared cluster has is seen only there
            say_how_it_speculates(resolve(config), config)
        connect(min_cpus=config.tp + 1)
        from kdray.actors.gang import Gang

        gang = Gang.start(config)
        try:
            return run(gang, arguments, sampling, sources)
        finally:
            gang.stop()
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def say_how_it_speculates(facts: EngineFacts, config: EngineConfig) -> None:
    if facts.drafter is None and config.mode != "plain":
        print("no --drafter: decoding plainly, one token a step", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", help="a prompt; may be given again")
    add("--input", type=Path, metavar="FILE.jsonl", help="prompts, one JSON object a line")
    add("--output", type=Path, metavar="FILE.jsonl", help="results, in the prompts' order")
    add("--raw", action="store_true", help="no chat template: the prompt is plain text")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--seed", type=int, default=0, help="addresses the noise at temperature > 0")
    add("--ignore-eos", action="store_true", help="run on to max-tokens")
    add("--json", action="store_true", help="end stdout with one line of JSON, print nothing else")
    return parser.parse_args(argv)


def read_sources(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.output is not None and not arguments.output.resolve().parent.is_dir():
        raise KdrayError(f"--output {arguments.output}: there is no such folder")
    sources = [{"prompt": prompt} for prompt in arguments.prompt or ()]
    if arguments.input is not None:
        try:
            lines = arguments.input.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise KdrayError(f"--input {arguments.input} cannot be read: {error}") from None
        sources += [parse_line(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
        if not sources:
            raise KdrayError(f"--input {arguments.input} holds no prompts")
    return sources or [{"prompt": DEFAULT_PROMPT}]


def parse_line(number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise KdrayError(f"--input line {number} is not JSON: {error}") from None
    if not isinstance(value, dict) or not ("prompt" in value or "messages" in value):
        raise KdrayError(f'--input line {number} needs a "prompt" or "messages"')
    try:
        check_messages(messages_of(value))
    except InvalidRequest as error:
        raise KdrayError(f"--input line {number}: {error}") from None
    return value


def messages_of(source: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = source.get("messages") or [
        {"role": "user", "content": source.get("prompt")}
    ]
    return messages


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )


def run(
    gang: Any,
    arguments: argparse.Namespace,
    sampling: SamplingParams,
    sources: list[dict[str, Any]],
) -> int:
    import ray

    tokenizer = Tokenizer.from_folder(gang.info["model_folder"])
    if not sampling.ignore_eos:
        sampling = replace(sampling, stop_token_ids=tuple(sorted(tokenizer.end_token_ids)))
    lines = [encode(n, source, tokenizer, arguments) for n, source in enumerate(sources)]
    before = ray.get(gang.driver.stats.remote())
    messages = gang.driver.outputs.options(num_returns="streaming").remote()
    start = time.perf_counter()
    submit(gang, lines, sampling)
    show = Display(lines, quiet=arguments.json)
    for line in follow(messages, lines):
        show.step(line)
    seconds = time.perf_counter() - start
    after = ray.get(gang.driver.stats.remote())
    report = summarize(lines, seconds, before, after)
    if arguments.output is not None:
        write_output(arguments.output, lines)
    if arguments.json:
        print(json.dumps(report))
    else:
        show.table(report)
    return 0


def encode(
    number: int, source: dict[str, Any], tokenizer: Tokenizer, arguments: argparse.Namespace
) -> Line:
    if arguments.raw and "messages" not in source:
        ids = tokenizer.encode(source["prompt"])
    else:
        ids = encode_chat(tokenizer, messages_of(source))
    return Line(f"line-{number}", source, tuple(ids), StreamDecoder(tokenizer))


def submit(gang: Any, lines: Sequence[Line], sampling: SamplingParams) -> None:
    """Line n draws with seed + n, so that equal prompts differ and a run can be repeated."""
    import ray

    seeds = [replace(sampling, seed=(sampling.seed or 0) + n) for n in range(len(lines))]
    try:
        ray.get(
            [
                gang.driver.submit.remote(line.request_id, line.prompt, seed)
                for line, seed in zip(lines, seeds, strict=True)
            ]
        )
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, KdrayError) else error from None


def follow(messages: Any, lines: Sequence[Line]) -> Iterator[Line]:
    """Apply one message a step until every line has ended; yields each line that moved."""
    import ray

    open_lines = {line.request_id: line for line in lines}
    for ref in messages:
        for request_id, token_ids, accept_length, reason in ray.get(ref):
            line = open_lines.get(request_id)
            if line is None:
                continue
            line.token_ids.extend(token_ids)
            line.text += line.decoder.feed(list(token_ids))
            if accept_length is not None:
                line.accept_lengths.append(accept_length)
            if reason is not None:
                line.text += line.decoder.flush()
                line.finish_reason = reason
                del open_lines[request_id]
            yield line
        if not open_lines:
            return


def summarize(
    lines: Sequence[Line], seconds: float, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    lengths = Counter(length for line in lines for length in line.accept_lengths)
    generated = sum(len(line.token_ids) for line in lines)
    steps = after["steps"] - before["steps"]
    return {
        "tokens_per_s": generated / seconds,
        "generated_tokens": generated,
        "steps": steps,
        "target_forwards": steps,
        "accept_length_mean": mean(lengths),
        "accept_length_histogram": {str(n): lengths[n] for n in sorted(lengths)},
        "stage_ms": {
            verb: 1000 * (total - before["stage_seconds"].get(verb, 0.0))
            for verb, total in after["stage_seconds"].items()
        },
        "texts": [line.text for line in lines],
        "token_ids": [line.token_ids for line in lines],
    }


def mean(lengths: Counter[int]) -> float | None:
    """Mean accept length; None where nothing was drafted."""
    count = lengths.total()
    return sum(n * times for n, times in lengths.items()) / count if count else None


def write_output(path: Path, lines: Sequence[Line]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            record = line.source | {
                "text": line.text,
                "token_ids": line.token_ids,
                "finish_reason": line.finish_reason,
                "accept_length_mean": mean(Counter(line.accept_lengths)),
            }
            file.write(json.dumps(record) + "\n")


class Display:
    """One prompt: its text as it comes. Several: a progress line, and each text when it ends."""

    def __init__(self, lines: Sequence[Line], *, quiet: bool) -> None:
        self._lines = lines
        self._quiet = quiet
        self._shown = 0
        self._tokens = 0
        self._start = time.perf_counter()

    def step(self, line: Line) -> None:
        if self._quiet:
            return
        if len(self._lines) == 1:
            print(line.text[self._shown :], end="", flush=True)
            self._shown = len(line.text)
        elif line.finish_reason is not None:
            clear = "\r\033[K" if sys.stderr.isatty() else ""
            print(clear, end="", file=sys.stderr, flush=True)
            print(f"--- {line.request_id}\n{line.text}", flush=True)
        if len(self._lines) > 1 and sys.stderr.isatty():
            self._progress()

    def table(self, report: dict[str, Any]) -> None:
        accept = report["accept_length_mean"]
        stages = report["stage_ms"]
        total = sum(stages.values()) or 1.0
        shares = "  ".join(f"{verb} {100 * ms / total:.0f}%" for verb, ms in stages.items())
        print(
            "\n\n"
            f"  tokens         {report['generated_tokens']}\n"
            f"  tokens/s       {report['tokens_per_s']:.0f}\n"
            f"  steps          {report['steps']}\n"
            f"  accept length  {f'{accept:.2f}' if accept else '- (plain decoding)'}\n"
            f"  time           {shares}"
        )

    def _progress(self) -> None:
        done = sum(line.finish_reason is not None for line in self._lines)
        tokens = sum(len(line.token_ids) for line in self._lines)
        rate = tokens / (time.perf_counter() - self._start)
        bar = "#" * (20 * done // len(self._lines))
        state = f"{done}/{len(self._lines)} prompts, {tokens} tokens, {rate:.0f} tokens/s"
        print(f"\r[{bar:<20}] {state}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
