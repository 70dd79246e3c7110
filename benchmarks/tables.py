#!/usr/bin/env python3
"""Writes the README's headline and tables from the results files, between their marks.

python benchmarks/tables.py            # rewrite README.md
python benchmarks/tables.py --check    # exit 1 where README.md differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
Record = dict[str, Any]
MOST_IDLE = 0.05  # of a step that the headline tells of


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    before = README.read_text(encoding="utf-8")
    after = with_tables(before)
    if arguments.check:
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


def with_tables(text: str) -> str:
    """The text with every marked part made anew from its results files."""
    for name, (files, make) in PARTS.items():
        paths = [RESULTS / f"{file}.json" for file in files]
        if not all(path.exists() for path in paths):
            continue
        part = make(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place marked <!-- {name} --> .. <!-- /{name} -->")
        text = pattern.sub(lambda found, part=part: found[1] + part + found[2], text)
    return text


def headline(rounds: Record, trees: Record) -> str:
    """What trees gain over plain decoding, and what a batch of them costs to build.

    Batches whose GPU waits for the host say nothing of either and are left out.
    """
    gains = []
    for batch in sorted({row["params"]["batch"] for row in rounds["rows"]}):
        plain, tree = (_fastest(rounds, mode, batch) for mode in ("plain", "tree"))
        if max(row["metrics"]["idle"] for row in (plain, tree)) > MOST_IDLE:
            continue
        speeds = [row["metrics"]["tokens_per_s"] for row in (tree, plain)]
        gain = f"{speeds[0] / speeds[1]:.1f}"
        figures = f"{speeds[0]:,.0f} for {speeds[1]:,.0f} tokens/s, trees of {_budget(tree)}"
        times = f"**{gain} times** as fast with trees as plainly" if not gains else gain
        gains.append(f"{times} at batch {batch} ({figures})")
    built = max(_trees(trees), key=lambda row: (row["params"]["batch"], row["params"]["budget"]))
    metrics = built["metrics"]
    return (
        f"On **{hardware(rounds)}** the demo model decodes {', '.join(gains)}. The trees of "
        f"{built['params']['batch']} requests at budget {_budget(built)} are built in "
        f"**{metrics['graph_us']:.1f} us**, where a Python heap on the CPU takes "
        f"{metrics['cpu_ms']:.1f} ms.\n"
    )


def _fastest(rounds: Record, mode: str, batch: int) -> dict[str, Any]:
    """The demo model's row of the most tokens a second."""
    wanted = {"model": "demo", "graphs": True, "mode": mode, "batch": batch}
    return max(
        (row for row in rounds["rows"] if wanted.items() <= row["params"].items()),
        key=lambda row: row["metrics"]["tokens_per_s"],
    )


def _budget(row: dict[str, Any]) -> int:
    budget: int = row["params"]["budget"]
    return budget


def decode_table(record: Record) -> str:
    """tokens/s by way of decoding, batch 1 and the largest batch."""
    rows = {
        (row["params"]["mode"], row["params"]["budget"], row["params"]["batch"]): row["metrics"]
        for row in record["rows"]
    }
    batches = sorted({batch for _, _, batch in rows})
    ways = sorted({(mode, budget) for mode, budget, _ in rows}, key=_way_order)
    lines = [
        f"Demo model, greedy, {hardware(record)}, torch {record['versions']['torch']}, fp32 "
        f"(`jobs/bench_decode.py`, medians of {record['config']['repeats']}):",
        "",
        "| | accept length | "
        + " | ".join(f"tokens/s, batch {batch} | over plain" for batch in batches)
        + " |",
        "|---|---|" + "---|---|" * len(batches),
    ]
    for mode, budget in ways:
        accept = rows[mode, budget, batches[0]]["accept_length_mean"]
        cells = [_way_name(mode, budget), "" if accept is None else f"{accept:.2f}"]
        for batch in batches:
            speed = rows[mode, budget, batch]["tokens_per_s"]
            plain = rows["plain", 0, batch]["tokens_per_s"]
            cells += [f"{speed:.0f}", f"{speed / plain:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tree_table(record: Record) -> str:
    """The tree builder against the host's, L 7: twelve rows of batch and budget."""
    rows = _trees(record)
    lines = [
        f"Draft trees with masks, positions and links, L 7, {hardware(record)}, in a CUDA graph "
        "(`jobs/bench_tree_build.py`). Stream: issued from Python, one call after another. CPU: "
        "our writing of the heap builder of SGLang's DDTree ports (`jobs/host_tree.py`), one "
        "request at a time, copies included:",
        "",
        "| requests | budget | CPU, us | GPU in a stream, us | GPU in a graph, us | CPU / graph |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["params"]["batch"], row["params"]["budget"])):
        params, metrics = row["params"], row["metrics"]
        ratio = 1000 * metrics["cpu_ms"] / metrics["graph_us"]
        lines.append(
            f"| {params['batch']} | {params['budget']} | {1000 * metrics['cpu_ms']:,.0f} "
            f"| {metrics['stream_us']:.0f} | {metrics['graph_us']:.2f} | {ratio:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def round_table(record: Record) -> str:
    """The demo model's tokens/s by way of decoding and batch, in graphs and from the host."""
    rows = {
        (p["graphs"], p["mode"], p["budget"], p["batch"]): row["metrics"]
        for row in record["rows"]
        if (p := row["params"])["model"] == "demo"
    }
    batches = sorted({batch for _, _, _, batch in rows})
    ways = sorted({key[:3] for key in rows}, key=lambda key: (-key[0], _way_order(key[1:])))
    heads = " | ".join(f"batch {batch}: accept length | tokens/s" for batch in batches)
    lines = [
        f"Demo model, greedy, bf16, {hardware(record)}, torch {record['versions']['torch']}, "
        f"commit {record['commit']}, {record['config']['steps']} whole steps "
        "(`jobs/bench_round.py`):",
        "",
        f"| | {heads} |",
        "|---|" + "---|---|" * len(batches),
    ]
    for graphs, mode, budget in ways:
        own = [rows[graphs, mode, budget, batch] for batch in batches]
        name = _way_name(mode, budget) + ("" if graphs else ", `--no-graphs`")
        cells = " | ".join(f"{m['accept_length']:.2f} | {m['tokens_per_s']:,.0f}" for m in own)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def step_table(record: Record) -> str:
    """A rank's verify step of Kimi K2.6 by rows and context, with its floors."""
    rows = {
        (p["way"], p["context"], p["tokens"]): row["metrics"]
        for row in record["rows"]
        if (p := row["params"])["part"] == "step"
    }
    contexts = sorted({context for _, context, _ in rows})
    shown = [("tree", tokens) for tokens in (1, 4, 8, 16, 32, 64, 128)]
    shown += [("pass", tokens) for tokens in (64, 128, 512)]
    heads = " | ".join(f"context {context:,}: ms | floor" for context in contexts)
    lines = [
        "Kimi K2.6, one of 8 ranks whole (61 layers, random weights, INT4 experts; sums over ranks "
        f"left out), {hardware(record)}, commit {record['commit']} (`jobs/bench_step.py`):",
        "",
        f"| rows of a step | distinct experts a layer | {heads} |",
        "|---|---|" + "---|---|" * len(contexts),
    ]
    for way, tokens in shown:
        own = [rows[way, context, tokens] for context in contexts]
        cells = " | ".join(f"{m['ms']:.1f} | {m['floor_ms']:.1f}" for m in own)
        name = f"{tokens}, of a prompt" if way == "pass" else f"{tokens}"
        lines.append(f"| {name} | {own[0]['distinct_experts']:.0f} | {cells} |")
    return "\n".join([*lines, "", *_predictions(record)]) + "\n"


def _predictions(record: Record) -> list[str]:
    """Tokens/s of whole rounds at an assumed acceptance, measured here and predicted there."""
    rows = {
        (p["mode"], p["nodes"] - 1, p["requests"]): row["metrics"]
        for row in record["rows"]
        if (p := row["params"])["part"] == "prediction"
    }
    streams = sorted({requests for *_, requests in rows})
    ways = sorted({key[:2] for key in rows}, key=_way_order)
    heads = " | ".join(f"{_streams(n)}: here | 8 x RTX PRO 6000, predicted" for n in streams)
    lines = [
        "Tokens/s with the drafter, which the ranks share, 512 tokens cached, were drafts accepted "
        "as assumed (a chain of 7 accepts 2.66 tokens a step, as public runs do; "
        "`jobs/step_predict.py`):",
        "",
        f"| | tokens a step, assumed | {heads} |",
        "|---|---|" + "---|---|" * len(streams),
    ]
    for way in ways:
        own = [rows[*way, n] for n in streams]
        cells = " | ".join(
            f"{m['tokens_per_s_here']:,.0f} | {m['tokens_per_s_8x_rtx_pro_6000']:,.0f}" for m in own
        )
        lines.append(f"| {_way_name(*way)} | {own[0]['assumed_accept_length']:.2f} | {cells} |")
    for name, key in (("plain", "plain"), ("EAGLE-3", "eagle3")):
        public = [rows["plain", 0, n][f"public_{key}_tokens_per_s"] for n in streams]
        cells = " | ".join(f" | {rate:,.0f}" for rate in public)
        lines.append(f"| published for that card, {name} | | {cells} |")
    return lines


def _streams(number: int) -> str:
    return f"{number} stream" + ("s" if number > 1 else "")


def _trees(record: Record) -> list[dict[str, Any]]:
    """The rows that a host's builder was timed for as well, of budgets that are used."""
    return [
        row
        for row in record["rows"]
        if row["params"]["depth"] == 7
        and row["params"]["budget"] in (8, 16, 32)
        and "cpu_ms" in row["metrics"]
    ]


def hardware(record: Record) -> str:
    facts = record["hardware"]
    if facts["gpus"]:
        return f"{facts['gpus']} x {facts['gpu']}"
    return f"{facts['cores']} cores of {facts['cpu']}"


def _way_order(way: tuple[str, int]) -> tuple[int, int]:
    return (["transformers", "plain", "chain", "tree"].index(way[0]), way[1])


def _way_name(mode: str, budget: int) -> str:
    return {
        "transformers": "transformers' generate, same weights",
        "plain": "kdray, plain decoding",
        "chain": f"chain of {budget}",
        "tree": f"tree of {budget}",
    }[mode]


PARTS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "headline": (("round-h200", "tree_build-h200"), headline),
    "decode-cpu": (("decode-cpu",), decode_table),
    "tree_build-h200": (("tree_build-h200",), tree_table),
    "round-h200": (("round-h200",), round_table),
    "step-h200": (("step-h200",), step_table),
}

if __name__ == "__main__":
    sys.exit(main())
