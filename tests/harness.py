"""Runs prompts through a whole engine in this process, with any drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kdray.config import EngineConfig
from kdray.core.request import Request, SamplingParams
from kdray.driver.driver import Driver
from kdray.engine import Engine, EngineFacts, assemble, build_verifier, make_request, resolve
from kdray.kernels.ops import Ops, load_ops
from kdray.model.drafter import Drafter
from kdray.verifier.local_group import LocalGroup

MakeDrafter = Callable[[EngineFacts, Ops], Drafter]


def build(config: EngineConfig, make_drafter: MakeDrafter | None = None) -> Engine:
    """An engine of one rank; without make_drafter it decodes plainly."""
    facts = resolve(replace(config, drafter="none", device="cpu"))
    ops = load_ops(facts.device)
    drafter = make_drafter(facts, ops) if make_drafter else None
    verifier = build_verifier(config, facts, ops, taps=drafter.taps if drafter else ())
    return assemble(config, facts, ops, drafter, LocalGroup(verifier))


def submit(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | list[SamplingParams],
) -> list[Request]:
    each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    requests = [
        make_request(f"r{n}", prompt, params, engine.facts)
        for n, (prompt, params) in enumerate(zip(prompts, each, strict=True))
    ]
    for request in requests:
        engine.driver.submit(request)
    return requests


def drain(driver: Driver) -> None:
    while driver.step() is not None:
        driver.scheduler.pages.check()
    assert driver.scheduler.pages.num_used == 0


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.tokens[len(request.prompt) :] for request in requests]


def run(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | list[SamplingParams],
    make_drafter: MakeDrafter | None = None,
) -> tuple[list[list[int]], Driver]:
    """Output tokens of every prompt, and the driver with its counters."""
    engine = build(config, make_drafter)
    requests = submit(engine, prompts, sampling)
    drain(engine.driver)
    return outputs_of(requests), engine.driver


def model_config(folder: Path, **wishes: object) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", **wishes)  # type: ignore[arg-type]
