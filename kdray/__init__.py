"""kdray: lossless DDTree speculative decoding for DeepSeek-V3-family models, as a Ray job.

The folders are the places where code runs:

    core/       NumPy only: the tree, addressed sampling, requests, pages, the plan of a step
    kernels/    the ops of a round: one contract, a torch reference, CUDA
    model/      the target (MLA + MoE), the DFlash drafter, checkpoints, tokenizer, chat template
    verifier/   one rank: a shard that verifies trees, its KV cache, its collectives
    driver/     the round (draft, build, verify, accept, commit) and the schedule
    engine      wires one rank: config -> verifier, driver
    actors/     Ray: the gang of actors, one a rank
    serve/      HTTP: the OpenAI surface and the Ray Serve application
    llm         the same engine in one process, for notebooks

Names below are loaded when first used, so that `import kdray.core` needs nothing but NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdray.config import EngineConfig
    from kdray.core.request import SamplingParams
    from kdray.llm import LLM, Completion

__all__ = ["LLM", "Completion", "EngineConfig", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "kdray.llm",
    "Completion": "kdray.llm",
    "EngineConfig": "kdray.config",
    "SamplingParams": "kdray.core.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kdray' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
