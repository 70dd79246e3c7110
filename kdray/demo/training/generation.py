"""Batched generation for training: one static cache, prompts forced in the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdray.demo.tokenizer import DemoTokenizer
from kdray.demo.training.target import DemoTarget


@dataclass(frozen=True)
class GeneratedTexts:
    """tokens int64 [N, S], right padded; prompt [N] and end [N] lengths; answer = [prompt, end).

    The answer's last token is the end mark unless the text ran out of room.
    """

    tokens: Tensor
    prompt: Tensor
    end: Tensor

    def answer(self, row: int) -> list[int]:
        """Ids of one answer, its end mark included."""
        return list(self.tokens[row, self.prompt[row] : self.end[row]].tolist())


@dataclass(frozen=True)
class Sampling:
    """Temperature per row [N]; 0 is greedy. ``length`` is the room for prompt and answer.

    ``stop_after`` ends the generation that many tokens behind the longest prompt.
    """

    temperature: Tensor
    length: int
    stop_after: int | None = None


def generate(
    model: DemoTarget,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    tokenizer: DemoTokenizer,
) -> GeneratedTexts:
    """Continue all ``prompts`` at once, in the model's dtype, on the model's device."""
    device = model.lm_head.weight.device
    state = _State(model, prompts, sampling, tokenizer, device)
    with torch.no_grad():
        advance = state.captured() if device.type == "cuda" else state.advance
        for step in range(_steps(prompts, sampling)):
            advance()
            if step % 16 == 15 and bool(state.done.all()):
                break
    return state.texts()


def _steps(prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
    if sampling.stop_after is None:
        return sampling.length - 1
    return min(sampling.length - 1, max(map(len, prompts)) + sampling.stop_after)


class _State:
    """Static tensors of one generation."""

    def __init__(
        self,
        model: DemoTarget,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        tokenizer: DemoTokenizer,
        device: torch.device,
    ) -> None:
        shape, rows, length = model.shape, len(prompts), sampling.length
        self.model = model
        self.end_mark = tokenizer.special_ids["<|im_end|>"]
        self.pad = tokenizer.special_ids["[PAD]"]
        tokens = torch.full((rows, length), self.pad)
        for row, prompt in enumerate(prompts):
            if len(prompt) >= length:
                raise ValueError(f"prompt of {len(prompt)} tokens needs a length above {length}")
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.tokens = tokens.to(device)
        self.prompt = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.done = torch.zeros(rows, dtype=torch.bool, device=device)
        dtype = model.lm_head.weight.dtype
        self.caches = [
            torch.zeros(rows, length, shape.kv_rank + shape.rope, dtype=dtype, device=device)
            for _ in range(shape.layers)
        ]
        temperature = sampling.temperature.to(device)
        self.noisy = (temperature > 0).float()[:, None]
        self.inverse = 1.0 / torch.where(temperature > 0, temperature, 1.0)[:, None]

    def advance(self) -> None:
        """Compute the token after ``position`` for every row, then move on."""
        current = self.tokens.index_select(1, self.position)[:, 0]
        logits = self.model.decode(current, self.position, self.caches)
        noise = -torch.empty_like(logits).exponential_().log()
        drawn = (logits * self.inverse + noise * self.noisy).argmax(-1)
        self.position += 1
        given = self.tokens.index_select(1, self.position)[:, 0]
        forced = self.position < self.prompt
        token = torch.where(forced, given, torch.where(self.done, self.pad, drawn))
        self.tokens.index_copy_(1, self.position, token[:, None])
        self.done |= ~forced & (token == self.end_mark)

    def captured(self) -> _Replay:
        """``advance`` as a CUDA graph, with the state as it was before the capture."""
        before = [self.tokens.clone(), self.position.clone(), self.done.clone()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance()
        for tensor, saved in zip((self.tokens, self.position, self.done), before, strict=True):
            tensor.copy_(saved)
        return _Replay(graph)

    def texts(self) -> GeneratedTexts:
        """What was written so far."""
        is_end = self.tokens == self.end_mark
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        in_answer = is_end & (columns >= self.prompt[:, None])
        first = torch.where(in_answer, columns, self.position).amin(-1)
        return GeneratedTexts(self.tokens, self.prompt, first + 1)


@dataclass(frozen=True)
class _Replay:
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()
