#!/usr/bin/env python3
"""Offline generation on Ray: prompts in, text out.

    python jobs/generate.py --prompt "Tell a story about Mia and a red kite."
    python jobs/generate.py --input prompts.jsonl --output texts.jsonl --mode tree --budget 16
    ray job submit --working-dir . -- python jobs/generate.py --json --prompt "..."

Lines of --input are {"prompt": TEXT}, {"messages": [..]}, or those of OpenAI's batch files
({"custom_id", "method", "url", "body"}: their bodies say how they are drawn, not the options here).
Prompts go through the model's chat template unless --raw.

With --output a run that was interrupted, however, goes on where it was when it is started again:
what is done so far stands in FILE.jsonl.partial, and FILE.jsonl appears when it is whole, in the
input's order. Lines the engine refuses have an error in their place. Exit status: 0 all well, 1 a
line was refused or the run failed (the last line of stderr says which), 130 and 143 stopped by a
signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Whatever takes long to import is imported in main(), where a Ctrl-C ends without a traceback.
from kdray.arguments import (
    HelpFormatter,
    add_engine_arguments,
    add_placement_arguments,
    engine_config,
    placement_of,
)
from kdray.config import EngineConfig
from kdray.errors import KdrayError

DEFAULT_PROMPT = "Tell a story about Mia and a red kite."
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return generate(arguments)
    except KdrayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except SystemExit:
        print("stopped by SIGTERM", file=sys.stderr)
        raise


def _terminated(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_engine_arguments(parser)
    add_placement_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", help=f"may be given again (default: {DEFAULT_PROMPT})")
    add("--input", type=Path, metavar="FILE.jsonl", help="requests, one JSON object a line")
    add("--output", type=Path, metavar="FILE.jsonl", help="results, in the input's order")
    add("--overwrite", action="store_true", help="begin --output anew, whatever is there")
    add("--served-name", help="the model id that OpenAI lines name (default: the model's own)")
    add("--raw", action="store_true", help="no chat template: the prompt is plain text")
    add("--max-tokens", type=int, default=128, help="tokens of an output at most")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest, so much in all; 1: all")
    add("--top-k", type=int, default=0, help="draw from so many of the likeliest; 0: from all")
    add("--seed", type=int, default=0, help="addresses the noise at temperature > 0")
    add("--ignore-eos", action="store_true", help="run on to max-tokens")
    add("--json", action="store_true", help="end stdout with one line of JSON, print nothing else")
    arguments = parser.parse_args(argv)
    if arguments.output is not None and arguments.input is None:
        parser.error("--output is for the lines of an --input")
    if arguments.prompt is not None and arguments.input is not None:
        parser.error("give prompts by --prompt or by --input, not by both")
    return arguments


def generate(arguments: argparse.Namespace) -> int:
    from batch_lines import prompt_lines, read_lines

    from kdray.core.request import SamplingParams

    config, placement = engine_config(arguments), placement_of(arguments)
    options = {name: getattr(arguments, name) for name in SAMPLING}
    SamplingParams(**options)  # refuses what is out of range
    if arguments.input is not None:
        lines = read_lines(arguments.input, options, raw=arguments.raw)
    else:
        lines = prompt_lines(arguments.prompt or [DEFAULT_PROMPT], options, raw=arguments.raw)
    look_ahead(config, arguments)
    # Ray reads its environment when it is imported, and connect() sets that up: so it comes first.
    from kdray.actors.cluster import connect

    if arguments.output is None:
        connect(min_cpus=config.tp + 1)
        from batch_run import run_shown

        return run_shown(config, placement, lines, arguments)
    from batch_journal import Journal, fingerprint

    settings: dict[str, Any] = options | {"raw": arguments.raw, "model": arguments.model}
    batch = fingerprint([line.source for line in lines], settings)
    with Journal(arguments.output, batch, overwrite=arguments.overwrite) as journal:
        connect(min_cpus=config.tp + 1)
        from batch_run import run_journalled

        return run_journalled(config, placement, lines, journal, arguments)


def look_ahead(config: EngineConfig, arguments: argparse.Namespace) -> None:
    """Say before anything starts what the model's files tell, where they are here: on a cluster
    only ranks may have them, and GPUs."""
    from kdray.engine import resolve

    shared = bool(os.environ.get("RAY_ADDRESS"))
    try:
        facts = resolve(replace(config, device="cpu") if shared else config)
    except KdrayError:
        if shared:
            return
        raise
    if arguments.max_tokens >= facts.max_model_len:
        raise KdrayError(
            f"--max-tokens {arguments.max_tokens} leaves no room for a prompt; the most this engine"
            f" takes is {facts.max_model_len}, prompt and output together"
        )
    if facts.acceptance is not None:
        print(
            "synthetic acceptance: drafts hold by chance, the text is not the model's",
            file=sys.stderr,
        )
    if facts.drafter is None and config.mode != "plain":
        print("no --drafter: decoding plainly, one token a step", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
