"""The demo tokenizer: byte-level BPE in Kimi's file form (tiktoken ranks, special names on top)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kdray.demo.chat import CHAT_TEMPLATE, END, MIDDLE, opening_of
from kdray.demo.text.document import Turn

VOCAB_SIZE = 2048
LARGEST_BASE = 1920
PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Splits text into pieces before merging. A digit is a piece, hence a token, of its own."""
NAMED_OFFSETS: Mapping[int, str] = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>",
    6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
    17: "<|im_middle|>", 22: "<think>", 23: "</think>",
}  # fmt: skip
"""Special names by their distance from the first special id: Kimi's own distances."""
_KEPT_IN_TEXT = frozenset(range(11, 16)) | {22, 23}


@dataclass(frozen=True)
class DemoTokenizer:
    """Base tokens (bytes, by rank); the special names follow up to ``VOCAB_SIZE``."""

    base: tuple[bytes, ...]

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Name to id of every special token; [UNK] and [PAD] are the last two ids."""
        count = VOCAB_SIZE - len(self.base)
        names = {**NAMED_OFFSETS, count - 2: "[UNK]", count - 1: "[PAD]"}
        return {
            names.get(offset, f"<|reserved_{offset}|>"): len(self.base) + offset
            for offset in range(count)
        }

    @cached_property
    def encoding(self) -> Any:
        """The tiktoken encoding."""
        import tiktoken

        ranks = {token: rank for rank, token in enumerate(self.base)}
        return tiktoken.Encoding(
            "kdray-demo", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ids
        )

    def encode(self, text: str) -> list[int]:
        """Ids of text in which special names mean nothing."""
        return list(self.encoding.encode_ordinary(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special names written out."""
        return str(self.encoding.decode(list(ids)))

    def encode_turns(self, turns: Iterable[Turn]) -> tuple[list[int], list[int]]:
        """Ids of a chat, and for each id 1 if a model is to learn it (answers, their end marks)."""
        ids: list[int] = []
        learnt: list[int] = []
        special = self.special_ids
        for turn in turns:
            mark, name = opening_of(turn)
            head = [special[mark], *self.encode(name), special[MIDDLE]]
            body = [*self.encode(turn.content), special[END]]
            ids += head + body
            learnt += [0] * len(head) + [int(turn.role == "assistant")] * len(body)
        return ids, learnt

    def encode_prompt(self, turns: Iterable[Turn]) -> list[int]:
        """Ids of a chat that ends where the assistant is to speak."""
        special = self.special_ids
        head = [special["<|im_assistant|>"], *self.encode("assistant"), special[MIDDLE]]
        return self.encode_turns(turns)[0] + head


def train_tokenizer(texts: Iterable[str]) -> DemoTokenizer:
    """Byte-level BPE over ``texts``; as many merges as occur, at most ``LARGEST_BASE`` tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_BASE,
        min_frequency=3,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    by_rank = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    to_byte = {character: byte for byte, character in byte_characters().items()}
    return DemoTokenizer(
        tuple(bytes(to_byte[character] for character in token) for token, _ in by_rank)
    )


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE files write for each byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def load_tokenizer(folder: Path) -> DemoTokenizer:
    """Read ``tiktoken.model`` of a folder."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    return DemoTokenizer(tuple(base64.b64decode(line.split()[0]) for line in lines if line))


def save_tokenizer(tokenizer: DemoTokenizer, folder: Path) -> None:
    """Write tiktoken.model, tokenizer_config.json and tokenizer.json."""
    lines = (
        base64.b64encode(token) + b" " + str(rank).encode()
        for rank, token in enumerate(tokenizer.base)
    )
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    _write_json(folder / "tokenizer_config.json", _config(tokenizer))
    _write_json(folder / "tokenizer.json", _fast_tokenizer(tokenizer))


def _added_tokens(tokenizer: DemoTokenizer) -> list[dict[str, Any]]:
    first = len(tokenizer.base)
    return [
        {
            "id": number, "content": name, "special": number - first not in _KEPT_IN_TEXT,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for name, number in tokenizer.special_ids.items()
    ]  # fmt: skip


def _config(tokenizer: DemoTokenizer) -> dict[str, Any]:
    added = {str(token.pop("id")): token for token in _added_tokens(tokenizer)}
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": END,
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pat_str": PATTERN,
        "chat_template": CHAT_TEMPLATE,
    }


def _fast_tokenizer(tokenizer: DemoTokenizer) -> dict[str, Any]:
    """The Hugging Face form: every split of a token into two tokens is a merge, by rank."""
    characters = byte_characters()
    written = ["".join(characters[byte] for byte in token) for token in tokenizer.base]
    ranks = {token: rank for rank, token in enumerate(written)}
    merges = [
        [token[:cut], token[cut:]]
        for token in written
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokenizer),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {**split, "invert": False},
                {**byte_level, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True, "vocab": ranks, "merges": merges,
        },
    }  # fmt: skip


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
