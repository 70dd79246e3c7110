"""The command line's engine options, the same in every job, and the EngineConfig they make."""

from __future__ import annotations

import argparse
from typing import get_args

from kdray.config import Device, DType, EngineConfig, Mode

_DEFAULTS = EngineConfig()


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of EngineConfig that a user sets by hand."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--model", default=_DEFAULTS.model, metavar="demo|PATH", help="model folder, or the demo")
    add("--drafter", default=_DEFAULTS.drafter, metavar="auto|none|PATH", help="DFlash folder")
    add("--tp", type=int, default=_DEFAULTS.tp, metavar="N", help="tensor-parallel ranks")
    add("--device", choices=get_args(Device), default=_DEFAULTS.device)
    add("--dtype", choices=get_args(DType), default=_DEFAULTS.dtype)
    add("--mode", choices=get_args(Mode), default=_DEFAULTS.mode, help="how to speculate")
    add("--budget", type=int, default=_DEFAULTS.budget, metavar="B", help="draft nodes a tree")
    add("--candidates", type=int, default=_DEFAULTS.candidates, metavar="K", help="per depth")
    add("--max-requests", type=int, default=_DEFAULTS.max_requests, help="running at once")
    add("--max-model-len", type=int, default=None, help="prompt + output tokens of a request")
    add("--prefill-chunk", type=int, default=_DEFAULTS.prefill_chunk, help="prompt tokens a step")
    add("--page-size", type=int, default=_DEFAULTS.page_size, help="tokens in a KV page")
    add("--num-pages", type=int, default=None, help="KV pages a rank")
    add("--threads", type=int, default=None, help="torch threads a rank on a CPU")
    add("--no-graphs", action="store_true", help="no CUDA graphs: every step from the host")


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError where an option is out of range."""
    return EngineConfig(
        model=arguments.model,
        drafter=arguments.drafter,
        tp=arguments.tp,
        device=arguments.device,
        dtype=arguments.dtype,
        mode=arguments.mode,
        budget=arguments.budget,
        candidates=arguments.candidates,
        max_requests=arguments.max_requests,
        max_model_len=arguments.max_model_len,
        prefill_chunk=arguments.prefill_chunk,
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        threads=arguments.threads,
        graphs=not arguments.no_graphs,
    )
