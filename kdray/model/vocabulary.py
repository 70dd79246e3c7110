"""A model folder's vocabulary: the bytes of every token and the way plain text becomes tokens.

Two file formats: `tiktoken.model` (base64 token, space, rank: what Kimi publishes) and
`tokenizer.json` (byte-level, through the tokenizers library). Nothing is ever fetched.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import tiktoken

from kdray.errors import CheckpointError, UnsupportedModel

# Kimi's files name no pattern; its tokenizer splits text in this order: a run of Han; a word of
# other letters, capitals first, with one leading sign and a contraction; up to three digits;
# signs with the line ends behind them; line ends; spaces before a word's own; spaces.
_HAN = r"[\p{Han}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        f"{_HAN}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Codec(Protocol):
    """Plain text to tokens, and a token to its bytes; knows nothing of special tokens."""

    @property
    def num_tokens(self) -> int:
        """Ids from this one on are special or reserved."""
        ...

    def is_plain(self, token: int) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    """A token no plain text becomes. is_control: it is left out of decoded text."""

    token: int
    name: str
    is_control: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """codec for the plain tokens; special tokens by id; `config` is tokenizer_config.json."""

    codec: Codec
    special: dict[int, SpecialToken]
    size: int
    config: dict[str, Any]


def has_vocabulary(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tiktoken.model", "tokenizer.json"))


def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a folder; CheckpointError says which file is missing or wrong."""
    config = _read_json(folder / "tokenizer_config.json", required=False)
    if (folder / "tiktoken.model").exists():
        pattern = config.get("pat_str") or KIMI_PATTERN
        codec: Codec = TiktokenCodec(folder / "tiktoken.model", pattern)
        named = config.get("added_tokens_decoder") or {}
    elif (folder / "tokenizer.json").exists():
        raw = _read_json(folder / "tokenizer.json", required=True)
        codec = JsonCodec(folder / "tokenizer.json", raw)
        named = {str(entry["id"]): entry for entry in raw.get("added_tokens") or ()}
    else:
        raise CheckpointError(f"{folder} holds neither tiktoken.model nor tokenizer.json")
    size = _vocab_size(folder, codec, named)
    special = _special_tokens(folder, codec, named, size)
    return Vocabulary(codec=codec, special=special, size=size, config=config)


class TiktokenCodec:
    """A tiktoken.model file: one token a line, in base64, with its rank."""

    def __init__(self, path: Path, pattern: str) -> None:
        ranks = _read_ranks(path)
        self.num_tokens = len(ranks)
        try:
            self._encoding = tiktoken.Encoding(
                path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as cause:
            raise CheckpointError(f"{path}: pat_str is not understood: {cause}") from cause

    def is_plain(self, token: int) -> bool:
        return token < self.num_tokens

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def token_bytes(self, token: int) -> bytes:
        return self._encoding.decode_single_token_bytes(token)


class JsonCodec:
    """A byte-level tokenizer.json, without its added tokens: those are this module's business."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        try:
            import tokenizers
        except ImportError as cause:
            raise CheckpointError(
                f"{path.parent} has no tiktoken.model, only tokenizer.json: "
                "install the tokenizers package to read it (pip install tokenizers)"
            ) from cause
        if "ByteLevel" not in json.dumps(raw.get("decoder")):
            raise UnsupportedModel(f"{path} is not byte-level; kdray reads byte-level BPE only")
        added = {entry["content"] for entry in raw.get("added_tokens") or ()}
        tokens = {t: i for t, i in raw["model"]["vocab"].items() if t not in added}
        self.num_tokens = 1 + max(tokens.values())
        self._bytes = {i: _bytes_of_spelling(t) for t, i in tokens.items()}
        plain = {**raw, "added_tokens": [], "post_processor": None}
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(plain))

    def is_plain(self, token: int) -> bool:
        return token in self._bytes

    def encode(self, text: str) -> list[int]:
        # Half a surrogate pair, as JSON may carry, is no character; tiktoken mends it by itself.
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self._tokenizer.encode(whole, add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank; the ranks must be 0 .. n - 1, the 256 single bytes among them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as cause:
            raise CheckpointError(
                f"{path}, line {number}: {line[:40]!r} is not a base64 token and a rank"
            ) from cause
    for expected, found in enumerate(sorted(ranks.values())):
        if found != expected:
            raise CheckpointError(f"{path}: rank {expected} is missing or stands twice")
    if not all(bytes([value]) in ranks for value in range(256)):
        raise CheckpointError(f"{path}: some single byte has no token, so not all text has one")
    return ranks


def _vocab_size(folder: Path, codec: Codec, named: dict[str, Any]) -> int:
    """The model's vocabulary where config.json tells it, else up to the last named token."""
    config = _read_json(folder / "config.json", required=False)
    text_config = config.get("text_config") or {}
    size = config.get("vocab_size") or text_config.get("vocab_size")
    known = max([codec.num_tokens, *(int(token) + 1 for token in named)])
    if size is None:
        return known
    if size < known:
        raise CheckpointError(
            f"{folder}: the tokenizer has {known} tokens, config.json's vocab_size is {size}"
        )
    return int(size)


def _special_tokens(
    folder: Path, codec: Codec, named: dict[str, Any], size: int
) -> dict[int, SpecialToken]:
    """Every id behind the plain tokens; those without a name are reserved."""
    special = {
        token: SpecialToken(token=token, name=f"<|reserved_token_{token}|>")
        for token in range(codec.num_tokens, size)
    }
    names: dict[str, int] = {}
    for key, entry in named.items():
        token, name = int(key), str(entry["content"])
        if codec.is_plain(token):
            raise CheckpointError(
                f"{folder}: special token {name} has id {token}, which is a plain token's; "
                f"free ids start at {codec.num_tokens}"
            )
        if names.setdefault(name, token) != token:
            raise CheckpointError(
                f"{folder}: special token {name} has two ids, {names[name]} and {token}"
            )
        is_control = bool(entry.get("special", True))
        special[token] = SpecialToken(token=token, name=name, is_control=is_control)
    return special


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """How byte-level files spell bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    spelled = {chr(value): value for value in printable}
    return spelled | {chr(0x100 + i): value for i, value in enumerate(others)}


def _bytes_of_spelling(spelling: str) -> bytes:
    return bytes(_byte_of_character()[character] for character in spelling)


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{path} cannot be read: {cause}") from cause
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
