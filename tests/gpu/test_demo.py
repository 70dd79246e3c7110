"""The demo model on a GPU writes what it writes on a CPU, near-ties of the logits aside."""

from __future__ import annotations

import numpy as np
import pytest

from kdray import LLM, EngineConfig, SamplingParams
from kdray.core.sampling import gumbel_noise
from kdray.demo import target_path
from kdray.demo.text import held_out_prompts
from kdray.kernels.ops import load_ops
from kdray.model.chat import encode_chat
from kdray.model.target import TargetModel
from tests.model.paged import PagedRunner, Part

pytestmark = pytest.mark.gpu

NEAR_TIE = 2e-3  # fp32 sums in another order: logits of up to 40 differ by a few 1e-5
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=96),
    "drawn": SamplingParams(max_tokens=96, temperature=0.8, seed=9),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with LLM(EngineConfig(device="cpu", mode="plain")) as llm:
        return [
            encode_chat(llm.tokenizer, document.prompt_messages)
            for kind in ("story", "problem", "function", "question")
            for document in held_out_prompts(kind, 6, seed=21)  # type: ignore[arg-type]
        ]


def generate(
    prompts: list[list[int]], sampling: SamplingParams, **wishes: object
) -> list[list[int]]:
    config = EngineConfig(dtype="float32", **wishes)  # type: ignore[arg-type]
    with LLM(config) as llm:
        return [completion.token_ids for completion in llm.generate(prompts, sampling)]


def margin(prefix: list[int], mine: int, other: int, sampling: SamplingParams) -> float:
    """How far apart two tokens stand, noise included, by the CPU's logits behind a prefix."""
    model = TargetModel.load(target_path(), ops=load_ops("cpu"))
    runner = PagedRunner(model)
    output = runner.run(Part(runner.text(len(prefix)), prefix))
    logits = model.logits(output.hidden[-1:])[0].numpy()
    if sampling.temperature > 0:
        noise = gumbel_noise(np.array([sampling.seed]), np.array([len(prefix)]), logits.shape[0])[0]
        logits = logits / sampling.temperature + noise
    return abs(float(logits[mine] - logits[other]))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("wishes", [
    {"mode": "plain"}, {"mode": "chain", "budget": 7}, {"budget": 16}, {"budget": 32},
    {"budget": 16, "page_size": 1}, {"budget": 16, "max_requests": 1},
], ids=str)  # fmt: skip
def test_a_gpu_writes_what_a_cpu_writes(
    prompts: list[list[int]], sampling: str, wishes: dict[str, object]
) -> None:
    params = SAMPLINGS[sampling]
    expected = generate(prompts, params, device="cpu", mode="plain")
    outputs = generate(prompts, params, device="cuda", **wishes)
    for n, (mine, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if mine == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
        gap = margin([*prompts[n], *theirs[:at]], mine[at], theirs[at], params)
        print(f"prompt {n}: differs at token {at}, margin {gap:.2e}")
        assert gap < NEAR_TIE
