"""PromQL, as much of it as a dashboard of ours writes: parsed whole, or refused with the place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = {"rate", "increase", "histogram_quantile", "time", "clamp_max", "clamp_min"}
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)|(?P<text>\"[^\"]*\")"
    r"|(?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])|(?P<sign>=~|!~|!=|[-+*/(){},=]))"
)


@dataclass(frozen=True)
class Selector:
    """One metric an expression reads, and the labels it names on it."""

    metric: str
    labels: frozenset[str]
    has_range: bool


@dataclass
class Parsed:
    """selectors, and labels that aggregations and matchings name anywhere."""

    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)


def parse(text: str) -> Parsed:
    """Raises ValueError where the text is no expression."""
    parser = _Parser(text)
    parser.expression()
    if parser.at < len(parser.tokens):
        raise ValueError(f"{text!r}: {parser.tokens[parser.at]} is too much")
    return parser.found


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text!r}: no token at {at}")
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.at, self.found = text, _tokens(text), 0, Parsed()

    def expression(self) -> None:
        self._term()
        while self._take(*"+-*/"):
            for word in ("on", "ignoring", "group_left", "group_right"):
                if self._take(word):
                    self.found.labels |= self._names()
            self._term()

    def _term(self) -> None:
        kind, word = self._next()
        if kind == "number":
            return
        if word == "(":
            self.expression()
            self._expect(")")
        elif kind == "name" and word in AGGREGATIONS:
            self._aggregation()
        elif kind == "name" and self._take("("):
            if word not in FUNCTIONS:
                raise ValueError(f"{self.text!r}: no function {word}")
            self._arguments(ranged=word in ("rate", "increase"))
        elif kind == "name":
            self._selector(word)
        else:
            raise ValueError(f"{self.text!r}: {word} begins no term")

    def _aggregation(self) -> None:
        if self._take("by", "without"):
            self.found.labels |= self._names()
        self._expect("(")
        self.expression()
        self._expect(")")

    def _arguments(self, *, ranged: bool) -> None:
        before = len(self.found.selectors)
        if not self._take(")"):
            self.expression()
            while self._take(","):
                self.expression()
            self._expect(")")
        if ranged and [s.has_range for s in self.found.selectors[before:]] != [True]:
            raise ValueError(f"{self.text!r}: rate and increase take one series and its range")

    def _selector(self, metric: str) -> None:
        labels = set()
        if self._take("{"):
            while not self._take("}"):
                labels.add(self._next()[1])
                self._expect("=", "=~", "!=", "!~")
                if self._next()[0] != "text":
                    raise ValueError(f"{self.text!r}: a label's value must be a text")
                self._take(",")
        has_range = self.at < len(self.tokens) and self.tokens[self.at][0] == "range"
        self.at += has_range
        self.found.selectors.append(Selector(metric, frozenset(labels), has_range))

    def _names(self) -> set[str]:
        self._expect("(")
        names = set()
        while not self._take(")"):
            kind, name = self._next()
            if kind != "name":
                raise ValueError(f"{self.text!r}: {name} is no label")
            names.add(name)
            self._take(",")
        return names

    def _next(self) -> tuple[str, str]:
        if self.at == len(self.tokens):
            raise ValueError(f"{self.text!r} ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def _take(self, *words: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at][1] in words:
            self.at += 1
            return True
        return False

    def _expect(self, *words: str) -> None:
        if not self._take(*words):
            raise ValueError(f"{self.text!r}: {' or '.join(words)} expected at token {self.at}")
