"""Text to token ids and back. Only what the program itself writes can become special tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from kdray.config import LoadFormat
from kdray.errors import CheckpointError, InvalidRequest
from kdray.model.stand_in import CHAT_TEMPLATE, stand_in
from kdray.model.vocabulary import Vocabulary, has_vocabulary, read_vocabulary

# Byte pair merging is quadratic in the length of an unbroken run: cut as Kimi's own code does.
_MAX_CHARACTERS = 400_000
_MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN + 1},}}|\S{{{_MAX_RUN + 1},}}")

_END_NAMES = ("<|im_end|>", "[EOS]")


class Tokenizer:
    """The tokenizer of a model folder.

    vocab_size      ids run from 0 to vocab_size - 1
    end_token_ids   ids that end an answer: <|im_end|> and [EOS] where named, and the eos_token
    chat_template   the folder's own Jinja template, or None
    """

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self._vocabulary = vocabulary
        self._ids = {special.name: token for token, special in vocabulary.special.items()}
        self.vocab_size = vocabulary.size
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: str | Path, load_format: LoadFormat = "auto") -> Tokenizer:
        """Read tiktoken.model or tokenizer.json with tokenizer_config.json beside it.

        load_format: "dummy" is content with a folder that has neither (kdray.model.stand_in).
        Raises CheckpointError; fetches nothing.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: no tokenizer to read")
        if load_format == "dummy" and not has_vocabulary(folder):
            return cls(stand_in(folder), CHAT_TEMPLATE)
        vocabulary = read_vocabulary(folder)
        return cls(vocabulary, _chat_template(folder, vocabulary.config))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of a text; names of special tokens stay plain text unless allow_special."""
        if not allow_special:
            return self._encode_plain(text)
        ids: list[int] = []
        start = 0
        for match in self.special_pattern.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(self._ids[match.group()])
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        skip_special leaves out control tokens; think and tool markers always stay.
        """
        raw = b"".join(self.token_bytes(token, skip_special=skip_special) for token in ids)
        return raw.decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one token, b"" for a control token left out."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is not in 0 .. {self.vocab_size - 1}")
        special = self._vocabulary.special.get(token)
        if special is None:
            return self._vocabulary.codec.token_bytes(token)
        return b"" if special.is_control and skip_special else special.name.encode()

    def special_id(self, name: str) -> int:
        """The id of a special token; CheckpointError where the vocabulary has none of that name."""
        try:
            return self._ids[name]
        except KeyError:
            raise CheckpointError(f"the tokenizer has no special token {name}") from None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens."""
        codec = self._vocabulary.codec
        plain = (token for token in range(codec.num_tokens) if codec.is_plain(token))
        return max((len(codec.token_bytes(token)) for token in plain), default=1)

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        names = (*_END_NAMES, self.special_names.get("eos_token"))
        return frozenset(self._ids[name] for name in names if name in self._ids)

    @cached_property
    def special_names(self) -> dict[str, str]:
        """Names by role (bos_token, eos_token, ..), as tokenizer_config.json gives them."""
        names: dict[str, str] = {}
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value: Any = self._vocabulary.config.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                names[role] = value
        return names

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the name of any special token, the longest where several fit."""
        names = sorted(self._ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _parts(text):
            ids += self._vocabulary.codec.encode(part)
        return ids


class StreamDecoder:
    """Tokens to text as they come; a character is given out once all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """The text these tokens complete."""
        skip = self._skip_special
        return self._utf8.decode(
            b"".join(self._tokenizer.token_bytes(token, skip_special=skip) for token in ids)
        )

    def flush(self) -> str:
        """What was held back, at the end of the output: U+FFFD for a character cut short."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text before the first stop string to be completed.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is safe to give out, whether a stop string was met).

        A tail that may turn into a stop string is held back.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held, self._stopped = "", True
            return text[: min(ends)[1]], True
        keep = self._unfinished(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The tail held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def _parts(text: str) -> Iterator[str]:
    """The text in pieces of at most 400,000 characters, none with an unbroken run over 25,000."""
    for start in range(0, len(text), _MAX_CHARACTERS):
        piece = text[start : start + _MAX_CHARACTERS]
        cut = 0
        for run in _LONG_RUN.finditer(piece):
            for at in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield piece[cut:at]
                cut = at
        yield piece[cut:]


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name: the one named default
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
