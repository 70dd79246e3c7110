"""A scripted engine and a byte tokenizer: token n is the byte n, so that text is easy to script."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from kdray.core.events import EventCounters
from kdray.core.profile import ProfileOptions
from kdray.core.request import SamplingParams
from kdray.driver.step_loop import DriverStats
from kdray.errors import ConfigError, EngineClosed, ProfileConflict
from kdray.model.tokenizer import Tokenizer
from kdray.serve.engine import EngineInfo, RequestDelta

NUM_BYTES = 256
SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
)
VOCAB_SIZE = NUM_BYTES + 16
IM_END = NUM_BYTES + SPECIALS.index("<|im_end|>")
MAX_MODEL_LEN = 512
STATS = DriverStats(
    running=2,
    waiting=1,
    pages_used=7,
    pages_total=64,
    prompt_tokens=90,
    generated_tokens=40,
    steps=12,
    verified_rows=300,
    accept_lengths={1: 3, 4: 5},
    tree_nodes={3: 2, 16: 6},
    stage_seconds={"draft": 0.25, "verify": 1.5},
    rank_ages_s={0: 0.0, 1: 0.25},
)

Script = Sequence[RequestDelta]


def byte_tokenizer(folder: Path) -> Tokenizer:
    """256 single bytes and Kimi's special names."""
    lines = [f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(NUM_BYTES)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(NUM_BYTES + i): {"content": name} for i, name in enumerate(SPECIALS)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return Tokenizer.from_folder(folder)


def steps(*parts: str | bytes, finish: str = "length") -> list[RequestDelta]:
    """One delta a part; the first as a prefill's, the others speculative; the last one finishes."""
    return [
        RequestDelta(
            token_ids=tuple(part.encode() if isinstance(part, str) else part),
            accept_length=None if i == 0 else len(part),
            finish_reason=finish if i == len(parts) - 1 else None,
        )
        for i, part in enumerate(parts)
    ]


def running(*parts: str) -> list[RequestDelta]:
    """Steps of a request that does not finish by itself."""
    return [RequestDelta(token_ids=delta.token_ids) for delta in steps(*parts)]


class FakeProfiles:
    """One finished profile named "p", and whatever options the last start got."""

    def __init__(self) -> None:
        self.options: ProfileOptions | None = None
        self.files = {"summary.txt": b"rank 0", "summary.json": b"{}", "merged.json.gz": b"gz"}

    async def start(self, options: ProfileOptions) -> dict[str, Any]:
        if self.options is not None:
            raise ProfileConflict("profile p is recording: stop it, or wait")
        if "GPU" in options.activities:
            raise ConfigError("the ranks have no GPU: activities can be CPU and MEM")
        self.options = options
        return {"id": "p", "state": "recording"}

    async def stop(self) -> dict[str, Any]:
        if self.options is None:
            raise ProfileConflict("no profile has been started")
        self.options = None
        sizes = {name: len(content) for name, content in self.files.items()}
        return {"id": "p", "state": "done", "steps": 5, "error": None, "files": sizes}

    async def names(self) -> list[str]:
        return ["p"]

    async def status(self, name: str) -> dict[str, Any]:
        return {"p": {"id": "p", "state": "done"}}[name]

    async def read(self, name: str, file: str) -> bytes:
        return {"p": self.files}[name][file]


class FakeEngine:
    """Answers every request with a script; after one without a finish it waits for ever.

    submitted   (request id, prompt, sampling) of each submit, in order
    aborted     request ids, one for each call of abort
    """

    def __init__(self, script: Script | Callable[[int], Script] = ()) -> None:
        self.info = EngineInfo(
            name="fake",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            end_token_ids=(IM_END,),
            mode="tree",
            budget=16,
            ranks=1,
        )
        self.events = EventCounters()
        self.profiles = FakeProfiles()
        self.submitted: list[tuple[str, list[int], SamplingParams]] = []
        self.aborted: list[str] = []
        self.refuse: Exception | None = None
        self.cause: str | None = None
        self.waiting = asyncio.Event()
        self._script = script
        self._scripts: dict[str, Script] = {}

    async def submit(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        if self.refuse is not None:
            raise self.refuse
        script = self._script(len(self.submitted)) if callable(self._script) else self._script
        self.submitted.append((request_id, prompt, sampling))
        self._scripts[request_id] = script

    async def outputs(self, request_id: str) -> AsyncIterator[RequestDelta]:
        for delta in self._scripts[request_id]:
            await asyncio.sleep(0)
            yield delta
            if delta.finish_reason is not None:
                return
        self.waiting.set()
        await asyncio.Event().wait()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stats(self) -> DriverStats:
        if self.cause is not None:
            raise EngineClosed(self.cause)
        return STATS

    def healthy(self) -> str | None:
        return self.cause

    @property
    def sampling(self) -> SamplingParams:
        """Of the only request."""
        [(_, _, sampling)] = self.submitted
        return sampling
