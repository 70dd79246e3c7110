"""What the text generator makes: exchanges, and documents of one or more exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["story", "problem", "function", "question", "recall"]
Fact: TypeAlias = str | int
KINDS: tuple[Kind, ...] = ("story", "problem", "function", "question", "recall")


@dataclass(frozen=True)
class Turn:
    """One message of a chat. ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Exchange:
    """A user's message and its answer.

    ``facts`` is what a checker needs to judge any answer to this prompt.
    ``choice_nats`` is the information in the free choices of the answer: summed over text and
    divided by its tokens it is the loss that no model can beat.
    """

    kind: Kind
    prompt: str
    answer: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    choice_nats: float = 0.0


@dataclass(frozen=True)
class Document:
    """A chat of one or more exchanges, perhaps opened by a system message."""

    exchanges: tuple[Exchange, ...]
    system: str | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the exchange the document opens with."""
        return self.exchanges[0].kind

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Facts of the exchange the document opens with."""
        return self.exchanges[0].facts

    @property
    def last(self) -> Exchange:
        """The exchange whose answer a held-out prompt asks for."""
        return self.exchanges[-1]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All messages in order."""
        opening = () if self.system is None else (Turn("system", self.system),)
        spoken = (
            turn
            for exchange in self.exchanges
            for turn in (Turn("user", exchange.prompt), Turn("assistant", exchange.answer))
        )
        return (*opening, *spoken)

    @property
    def prompt_turns(self) -> tuple[Turn, ...]:
        """All messages but the last answer."""
        return self.turns[:-1]

    @property
    def prompt_messages(self) -> list[dict[str, str]]:
        """prompt_turns as a chat template and OpenAI's API take them."""
        return [{"role": turn.role, "content": turn.content} for turn in self.prompt_turns]


@dataclass(frozen=True)
class Verdict:
    """A checker's judgement of one answer.

    ``strict``: the grammar itself could have written the answer, with one binding of its slots.
    ``facts``: no stated fact is contradicted, whatever the wording. ``reason`` is empty if strict.
    """

    strict: bool
    facts: bool
    reason: str = ""
