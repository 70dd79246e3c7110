"""The command line's engine options, the same in every job, and the EngineConfig they make."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, get_args

from kdray.actors.placement import Placement
from kdray.config import (
    Device,
    DraftWeightType,
    DType,
    EngineConfig,
    FaultPolicy,
    KVDType,
    LoadFormat,
    Mode,
    SyntheticAcceptance,
)
from kdray.errors import ConfigError
from kdray.sizes import bytes_of

_DEFAULTS = EngineConfig()


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps a description's lines and puts an option's default behind its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        default = action.default
        if default is None or isinstance(default, bool) or default == argparse.SUPPRESS:
            return text
        return f"{text} (default: {default})"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of EngineConfig that a user sets by hand."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--model", default=_DEFAULTS.model, metavar="demo|PATH", help="model folder, or the demo")
    add("--drafter", default=_DEFAULTS.drafter, metavar="auto|none|PATH", help="DFlash folder")
    add("--tp", type=int, default=_DEFAULTS.tp, metavar="N", help="tensor-parallel ranks")
    add("--device", choices=get_args(Device), default=_DEFAULTS.device, help="of every rank")
    add(
        "--dtype",
        choices=get_args(DType),
        default=_DEFAULTS.dtype,
        help="of weights and activations",
    )
    add("--kv-dtype", choices=get_args(KVDType), default=_DEFAULTS.kv_dtype, help="of the KV cache")
    add(
        "--draft-weights",
        choices=get_args(DraftWeightType),
        default=_DEFAULTS.draft_weights,
        help="of the drafter's MLPs",
    )
    add(
        "--draft-tp",
        default="auto",
        metavar="N|auto",
        help="ranks that share the drafter: --tp, 1, or auto: --tp where its sizes allow it",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="bfloat16 on GPUs: a token's bits do not depend on what shares its step, so that all "
        "modes say the same tokens, near ties too; slower",
    )
    add(
        "--load-format",
        choices=get_args(LoadFormat),
        default=_DEFAULTS.load_format,
        help="dummy: random weights by config.json alone, to see speed; text means nothing",
    )
    add("--mode", choices=get_args(Mode), default=_DEFAULTS.mode, help="how to speculate")
    add("--budget", type=int, default=_DEFAULTS.budget, metavar="B", help="draft nodes a tree")
    add("--candidates", type=int, default=_DEFAULTS.candidates, metavar="K", help="per depth")
    add("--max-requests", type=int, default=_DEFAULTS.max_requests, help="running at once")
    add(
        "--max-model-len",
        type=int,
        default=None,
        help="prompt + output tokens of a request (default: the model's)",
    )
    add("--prefill-chunk", type=int, default=_DEFAULTS.prefill_chunk, help="prompt tokens a step")
    add("--page-size", type=int, default=_DEFAULTS.page_size, help="tokens in a KV page")
    add("--num-pages", type=int, default=None, help="KV pages a rank (default: by --kv-memory)")
    add(
        "--kv-memory",
        metavar="SIZE",
        help="that KV pages may take of each rank: '20 GiB' (default: on GPUs all that the memory "
        "plan leaves, on a CPU 1 GiB)",
    )
    add(
        "--threads",
        type=int,
        default=None,
        help="torch threads a rank on a CPU (default: by cores)",
    )
    add("--no-graphs", action="store_true", help="no CUDA graphs: every step from the host")
    add("--nsight", action="store_true", help="start the ranks under Nsight Systems (nsys)")
    add(
        "--profile-folder",
        metavar="PATH",
        help="where profiles are written (default: a temporary folder)",
    )
    add(
        "--faults",
        metavar="NAME=VALUE,..",
        help="when ranks count as hung and how often they are started again, as fields of "
        "kdray.config.FaultPolicy: step_floor_s=30,max_restarts=10",
    )
    add(
        "--synthetic-acceptance",
        metavar="HITS[/SIBLINGS[/OFF_PATH]]",
        help="for benchmarks: accept drafts at these rates whatever the target says, as "
        "0.634 or 0.8,0.7,0.6/0.37,0.12/0.22 (kdray.config.SyntheticAcceptance); the text is not "
        "the model's",
    )


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Which GPUs of a cluster the ranks take."""
    add = parser.add_argument_group("placement").add_argument
    add(
        "--accelerator-type",
        metavar="NAME",
        help="as Ray names it: RTX-PRO-6000, H200 (default: any)",
    )
    add(
        "--gpus",
        metavar="N,N,..",
        help="the GPU of each rank by its number on the node, which this engine has to itself: "
        "skips a sick card, orders ranks along the PCIe tree (default: Ray's choice)",
    )


def placement_of(arguments: argparse.Namespace) -> Placement:
    """Raises ConfigError where --gpus is not a list of numbers."""
    return Placement(accelerator_type=arguments.accelerator_type, gpus=parse_gpus(arguments.gpus))


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError where an option is out of range."""
    return EngineConfig(
        model=arguments.model,
        drafter=arguments.drafter,
        tp=arguments.tp,
        device=arguments.device,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        draft_weights=arguments.draft_weights,
        draft_tp=parse_ranks("draft-tp", arguments.draft_tp),
        batch_invariant=arguments.batch_invariant,
        load_format=arguments.load_format,
        mode=arguments.mode,
        budget=arguments.budget,
        candidates=arguments.candidates,
        max_requests=arguments.max_requests,
        max_model_len=arguments.max_model_len,
        prefill_chunk=arguments.prefill_chunk,
        page_size=arguments.page_size,
        num_pages=arguments.num_pages,
        kv_memory_bytes=parse_size("kv-memory", arguments.kv_memory),
        threads=arguments.threads,
        graphs=not arguments.no_graphs,
        nsight=arguments.nsight,
        profile_folder=arguments.profile_folder,
        faults=parse_faults(arguments.faults),
        synthetic_acceptance=parse_acceptance(arguments.synthetic_acceptance),
    )


def parse_size(name: str, text: str | None) -> int | None:
    """ "20 GiB" to bytes, for the option of this name."""
    size = None if text is None else bytes_of(text)
    if text is not None and not size:
        raise ConfigError(
            f"{name} wants a size above 0 with its unit, such as 20 GiB, got {text!r}"
        )
    return size


def parse_ranks(name: str, text: str) -> int | None:
    """A number of ranks, or None for `auto`; a ConfigError says how else."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number or 'auto', got {text!r}") from None


def parse_faults(text: str | None) -> FaultPolicy:
    """ "step_floor_s=30,max_restarts=10" to a policy; what is not named keeps its default."""
    kinds: dict[str, Any] = {item.name: type(item.default) for item in fields(FaultPolicy)}
    given = {}
    for word in (text or "").split(",") if text else ():
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in kinds:
            raise ConfigError(f"faults has no {name!r}; it has {', '.join(kinds)}")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise ConfigError(f"faults: {name} must be a number, got {value!r}") from None
    return FaultPolicy(**given)


def parse_acceptance(text: str | None) -> SyntheticAcceptance | None:
    """ "0.8,0.7/0.4,0.1/0.2" to hits, siblings and off_path; what is missing keeps its default."""
    if text is None:
        return None
    try:
        rates = [tuple(map(float, part.split(","))) if part else () for part in text.split("/")]
        given: dict[str, Any] = dict(zip(("hits", "siblings", "off_path"), rates, strict=False))
        if len(rates) == 3:
            (given["off_path"],) = rates[2]
        elif len(rates) > 3:
            raise ValueError(text)
    except ValueError:
        raise ConfigError(
            f"synthetic-acceptance wants HITS[/SIBLINGS[/OFF_PATH]], such as 0.7,0.6/0.4/0.2, "
            f"got {text!r}"
        ) from None
    return SyntheticAcceptance(**given)


def parse_gpus(text: str | None) -> tuple[int, ...] | None:
    """ "0,1,3" to (0, 1, 3)."""
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"gpus must be numbers with commas between, got {text!r}") from None
