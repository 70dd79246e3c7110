"""A vocabulary for a folder that has none, where weights are dummies and text means nothing.

Plain text is its UTF-8 bytes, a token each, which read back as Latin-1; any other token's text is
its number. So every token has text of whole characters: a stream never waits for the rest of one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kdray.model.config import ModelConfig
from kdray.model.json_fields import read_json
from kdray.model.vocabulary import SpecialToken, Vocabulary

BYTES = 256
# Roles as plain text: there are no special tokens that would mark who speaks.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class StandInCodec:
    """special: ids that no plain text becomes."""

    def __init__(self, size: int, special: Collection[int]) -> None:
        self.num_tokens = size
        self._special = special
        ids = (token for token in range(size) if token not in special)
        self._of_byte = [token for _, token in zip(range(BYTES), ids, strict=False)]
        # Not what rings a terminal's bell.
        self._text = {
            token: chr(byte)
            for byte, token in enumerate(self._of_byte)
            if chr(byte).isprintable() or chr(byte).isspace()
        }

    def is_plain(self, token: int) -> bool:
        return token not in self._special

    def encode(self, text: str) -> list[int]:
        """In a vocabulary of fewer than 256 plain tokens some bytes share theirs."""
        ids = self._of_byte
        return [ids[byte % len(ids)] for byte in text.encode("utf-8", errors="replace")]

    def token_bytes(self, token: int) -> bytes:
        return self._text.get(token, f" {token}").encode()


def stand_in(folder: Path) -> Vocabulary:
    """By config.json alone. Its special tokens are shown, so that no step is without text."""
    config = ModelConfig.from_folder(folder)
    names = {token: f"<|begin_{token}|>" for token in _begins(folder)}
    names |= {token: f"<|end_{token}|>" for token in config.eos_token_ids}
    special = {
        token: SpecialToken(token=token, name=name, is_control=False)
        for token, name in names.items()
    }
    codec = StandInCodec(config.vocab_size, special.keys())
    return Vocabulary(codec=codec, special=special, size=config.vocab_size, config={})


def _begins(folder: Path) -> set[int]:
    fields = read_json(folder / "config.json")
    places = (fields, fields.get("text_config") or {})
    return {token for place in places if isinstance(token := place.get("bos_token_id"), int)}
