#!/usr/bin/env python3
"""Draws the plots of the docs from the results files, and from nothing else.

pip install -e '.[plots]' && python benchmarks/plot.py      # writes benchmarks/plots/*.svg

Reads benchmarks/results/round-HARDWARE.json (jobs/bench_round.py) and every
service*-HARDWARE.json (jobs/bench_service.py), whichever are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("plots need matplotlib: pip install -e '.[plots]'")

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, ScalarFormatter

HERE = Path(__file__).resolve().parent
RESULTS, PLOTS = HERE / "results", HERE / "plots"
VERBS = ("draft", "build", "verify", "accept", "commit")
BAR_INCHES = 0.2  # a bar with its name
MODELS = {"demo": "demo model", "random": "Kimi-shaped, 12 layers, random weights"}
# Okabe and Ito's palette: told apart by readers of any colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200")
    arguments = parser.parse_args(argv)
    rounds = RESULTS / f"round-{arguments.hardware}.json"
    services = sorted(RESULTS.glob(f"service*-{arguments.hardware}.json"))
    if not rounds.exists() and not services:
        sys.exit(f"no results of {arguments.hardware}: run jobs/bench_round.py or bench_service.py")
    plt.rcParams.update({
        "svg.hashsalt": "kdray", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False, "axes.prop_cycle": plt.cycler(color=COLOURS),
    })  # fmt: skip
    PLOTS.mkdir(exist_ok=True)
    if rounds.exists():
        draw_rounds(rounds, arguments.hardware)
    for path in services:
        record = json.loads(path.read_text(encoding="utf-8"))
        save(service(record["rows"]), path.stem, source_of(record))
    return 0


def draw_rounds(path: Path, hardware: str) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in record["rows"] if row["params"]["graphs"]]
    source = source_of(record)
    save(accept_lengths(rows), f"accept-length-{hardware}", source)
    save(throughput(rows), f"throughput-{hardware}", source)
    save(verbs(rows), f"verbs-{hardware}", source)


def source_of(record: dict[str, Any]) -> str:
    hardware = record["hardware"]
    return f"{hardware['gpu'] or hardware['cpu']}, commit {record['commit']}"


def accept_lengths(rows: Sequence[Row]) -> plt.Figure:
    """Accept length by draft nodes, demo model, greatest batch: the most texts."""
    figure, axes = plt.subplots(figsize=(4.2, 3))
    own = [row for row in rows if row["params"]["model"] == "demo"]
    batch = max(row["params"]["batch"] for row in own)
    for mode in ("chain", "tree"):
        points = sorted(
            (row["params"]["budget"], row["metrics"]["accept_length"])
            for row in own
            if row["params"]["mode"] == mode and row["params"]["batch"] == batch
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=mode)
    axes.set(xlabel="draft nodes", ylabel="accept length", title=f"demo model, {batch} texts")
    axes.set_ylim(bottom=1)
    axes.legend(frameon=False)
    return figure


def throughput(rows: Sequence[Row]) -> plt.Figure:
    """Tokens a second by batch, a line a way of decoding, demo model: colours are budgets."""
    figure, axes = plt.subplots(figsize=(5.4, 3.2))
    own = [row for row in rows if row["params"]["model"] == "demo"]
    budgets = sorted({way_of(row)[1] for row in own} - {0})
    colours = dict(zip((0, *budgets), ("black", *COLOURS), strict=False))
    for way in sorted({way_of(row) for row in own}, key=order):
        points = sorted(
            (row["params"]["batch"], row["metrics"]["tokens_per_s"])
            for row in own
            if way_of(row) == way
        )
        style = {"color": colours[way[1]], "linestyle": "--" if way[0] == "chain" else "-"}
        axes.plot(*zip(*points, strict=True), marker="o", label=name_of(way), **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({row["params"]["batch"] for row in own}))
    axes.set(xlabel="requests", ylabel="tokens/s", title=MODELS["demo"])
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def verbs(rows: Sequence[Row]) -> plt.Figure:
    """Milliseconds a step by verb, stacked."""
    models = [m for m in MODELS if any(row["params"]["model"] == m for row in rows)]
    wide = max(4.2 * len(models), BAR_INCHES * len(rows))
    figure, all_axes = plt.subplots(1, len(models), figsize=(wide, 3.6), squeeze=False)
    for axes, model in zip(all_axes[0], models, strict=True):
        own = sorted(
            (row for row in rows if row["params"]["model"] == model),
            key=lambda row: (row["params"]["batch"], order(way_of(row))),
        )
        names = [f"{name_of(way_of(row))} x{row['params']['batch']}" for row in own]
        below = [0.0] * len(own)
        for verb in VERBS:
            heights = [row["metrics"][f"{verb}_ms"] for row in own]
            axes.bar(names, heights, bottom=below, label=verb)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.tick_params(axis="x", rotation=90)
        axes.set(ylabel="ms a step", title=MODELS[model])
        axes.legend(frameon=False)
    return figure


def service(rows: Sequence[Row]) -> plt.Figure:
    """Closed loops: tokens a second in all and of a stream, and the waits, by clients."""
    figure, (speed, wait) = plt.subplots(1, 2, figsize=(8.4, 3.2))
    own = sorted(
        (row for row in rows if row["params"]["mode"] == "closed"),
        key=lambda row: row["params"]["concurrency"],
    )
    clients = [row["params"]["concurrency"] for row in own]
    drawn = (
        (speed, "tokens_per_s", "in all"),
        (speed, "stream_tokens_per_s", "a stream, median"),
        (wait, "ttft_ms_p99", "first token, p99"),
        (wait, "ttft_ms_p50", "first token, median"),
        (wait, "tpot_ms_p99", "a later token, p99"),
        (wait, "tpot_ms_p50", "a later token, median"),
    )
    for axes, metric, label in drawn:
        axes.plot(clients, [row["metrics"][metric] for row in own], marker="o", label=label)
    for axes, unit in ((speed, "tokens/s"), (wait, "ms")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        axes.set_xticks(clients)
        axes.set(xlabel="clients", ylabel=unit)
        axes.legend(frameon=False)
    return figure


def way_of(row: Row) -> tuple[str, int]:
    return row["params"]["mode"], row["params"]["budget"]


def order(way: tuple[str, int]) -> tuple[int, int]:
    return ("plain", "chain", "tree").index(way[0]), way[1]


def name_of(way: tuple[str, int]) -> str:
    return "plain" if way[0] == "plain" else f"{way[0]} of {way[1]}"


def save(figure: plt.Figure, name: str, source: str) -> None:
    figure.text(0.99, 0.005, source, ha="right", fontsize=6, color="#666666")
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
