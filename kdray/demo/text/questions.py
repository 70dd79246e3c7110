"""Questions about kdray itself, and small talk."""

from __future__ import annotations

from collections.abc import Mapping

from kdray.demo.text.document import Exchange, Fact, Verdict
from kdray.demo.text.draw import Draw, is_held_out
from kdray.demo.text.topics import SMALL_TALK, TOPICS

HELD_OUT_SHARE = 0.12
FRAMES = (
    "{What}?",
    "Can you tell me {what}?",
    "Please explain {what}.",
    "I would like to know {what}.",
    "Tell me {what}.",
    "In kdray, {what_inverted}?",
    "Do you know {what}?",
    "One more thing: {what_inverted}?",
)
TOPIC_NAMES = tuple(TOPICS)


def make_question(draw: Draw, held_out: bool = False) -> Exchange:
    """A question and its one answer; ``held_out``: a (topic, frame) never shown in training."""
    if not held_out and draw.chance(0.1):
        return _small_talk(draw)
    while True:
        topic, frame = draw.fact(TOPIC_NAMES), draw.fact(FRAMES)
        if is_held_out(HELD_OUT_SHARE, topic, frame) == held_out:
            break
    asked = TOPICS[topic].asked
    indirect = asked.indirect
    prompt = frame.format(
        What=asked.direct[0].upper() + asked.direct[1:], what=indirect, what_inverted=asked.direct
    )
    return Exchange("question", prompt, TOPICS[topic].answer, {"topic": topic})


def _small_talk(draw: Draw) -> Exchange:
    name = draw.fact(tuple(SMALL_TALK))
    said, answer = SMALL_TALK[name]
    return Exchange("question", draw.fact(said), answer, {"topic": name})


def check_question(facts: Mapping[str, Fact], answer: str) -> Verdict:
    """There is one answer to a question: both judgements ask for exactly it."""
    topic = str(facts["topic"])
    expected = TOPICS[topic].answer if topic in TOPICS else SMALL_TALK[topic][1]
    right = answer.strip() == expected
    return Verdict(right, right, "" if right else f"expected {expected!r}")
