"""Tokens to text: characters are whole, stop strings cut exactly, usage counts what was used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdray.core.request import SamplingParams
from kdray.model.tokenizer import Tokenizer
from kdray.serve.engine import RequestDelta
from kdray.serve.text import ChoiceStep, ChoiceText
from tests.serve.fakes import IM_END, steps


def read(
    tokenizer: Tokenizer, deltas: list[RequestDelta], **sampling: object
) -> tuple[str, int, str | None]:
    """Text, tokens counted, finish reason, of all deltas until one finishes."""
    text = ChoiceText(0, tokenizer, SamplingParams(**sampling))  # type: ignore[arg-type]
    read: list[ChoiceStep] = []
    for delta in deltas:
        read.append(text.feed(delta))
        if read[-1].finish_reason is not None:
            break
    reason = read[-1].finish_reason
    return "".join(step.text for step in read), sum(step.num_tokens for step in read), reason


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    """`raw` in parts that end at the sorted places `at`."""
    ends = [*sorted({min(place, len(raw)) for place in at}), len(raw)]
    parts = [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return [part for part in parts if part]


CUTS = st.lists(st.integers(1, 60), max_size=12)


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    text = ChoiceText(0, tokenizer, SamplingParams())
    smile = "\U0001f600".encode()
    assert [text.feed(delta).text for delta in steps(b"a" + smile[:1], smile[1:3], smile[3:])] == [
        "a",
        "",
        "\U0001f600",
    ]


def test_half_a_character_at_the_end_is_not_lost(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, steps(b"a", b"\xf0\x9f")) == ("a\ufffd", 3, "length")


@given(text=st.text(min_size=1, max_size=30), cuts=CUTS)
def test_any_cut_gives_the_same_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    deltas = steps(*cut(text.encode(), cuts))
    assert read(tokenizer, deltas) == (text, len(text.encode()), "length")


@given(cuts=CUTS, stop=st.sampled_from(["STOP", "S", "OP h", "\u00e9", "P he"]))
def test_any_cut_stops_at_the_same_place(tokenizer: Tokenizer, cuts: list[int], stop: str) -> None:
    text = "SSTO caf\u00e9 SSTOP here, and STOP again"
    before = text[: text.index(stop)]
    tokens = len((before + stop).encode())
    deltas = steps(*cut(text.encode(), cuts))
    assert read(tokenizer, deltas, stop=(stop, "absent")) == (before, tokens, "stop")


def test_what_looked_like_a_stop_is_given_back_at_the_end(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, steps("one ST", "O"), stop=("STOP",)) == ("one STO", 7, "length")


def test_a_stop_in_the_last_step_says_stop(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, steps("ab", "cSTOPd"), stop=("STOP",)) == ("abc", 7, "stop")


def test_a_stop_token_ends_the_text_but_is_counted(tokenizer: Tokenizer) -> None:
    deltas = steps("ab", "c.", finish="stop")
    assert read(tokenizer, deltas, stop_token_ids=(ord("."),)) == ("abc", 4, "stop")


def test_a_stop_token_below_a_length_limit_is_text(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, steps("c."), stop_token_ids=(ord("."),)) == ("c.", 2, "length")


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    deltas = [RequestDelta(token_ids=(104, IM_END), accept_length=2, finish_reason="stop")]
    assert read(tokenizer, deltas) == ("h", 2, "stop")


def test_accept_lengths_pass_through(tokenizer: Tokenizer) -> None:
    text = ChoiceText(3, tokenizer, SamplingParams())
    first, second = (text.feed(delta) for delta in steps("a", "bcd"))
    assert (first.index, first.accept_length, second.accept_length) == (3, None, 3)
