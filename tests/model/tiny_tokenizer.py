"""A small tokenizer folder in Kimi's file form."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

MERGED = (b" the", b"th", b"he", b"in", b"er", b" a", b"\xe4\xbd", b"\xe4\xbd\xa0", b"12", b"123")
NUM_PLAIN = 256 + len(MERGED)
NAMES = {
    NUM_PLAIN + 0: "[BOS]",
    NUM_PLAIN + 1: "[EOS]",
    NUM_PLAIN + 2: "<|im_end|>",
    NUM_PLAIN + 3: "<|im_user|>",
    NUM_PLAIN + 4: "<|im_assistant|>",
    NUM_PLAIN + 10: "<|im_system|>",
    NUM_PLAIN + 17: "<|im_middle|>",
    NUM_PLAIN + 22: "<think>",
    NUM_PLAIN + 23: "</think>",
}
KEPT_IN_TEXT = ("<think>", "</think>")
VOCAB_SIZE = NUM_PLAIN + 30


def write_tokenizer(folder: Path, **changes: Any) -> Path:
    """tiktoken.model, tokenizer_config.json and config.json; changes go into the second."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder, [bytes([value]) for value in range(256)] + list(MERGED))
    config = {
        "added_tokens_decoder": {
            str(token): {"content": name, "special": name not in KEPT_IN_TEXT}
            for token, name in NAMES.items()
        },
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return folder


def write_ranks(folder: Path, tokens: list[bytes], first: int = 0) -> None:
    lines = [
        b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens, start=first)
    ]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
