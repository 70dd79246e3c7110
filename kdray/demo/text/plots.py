"""The plots: what happens in a story, sentence by sentence, each with several wordings.

A step is a tuple of wordings; a wording is text with slots (see ``slots.py``). Every plot names the
hero, a friend, an animal, an object with a colour, a place and the weather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Step: TypeAlias = tuple[str, ...]
Rule: TypeAlias = Literal["none", "plus", "minus"]

OPENING: Step = (
    "It was a {weather} morning, and {hero} went for a walk {place}.",
    "One {weather} day, {hero} was playing {place}.",
    "On a {weather} afternoon, {hero} sat {place} and looked around.",
    "{hero} woke up early on a {weather} day and soon stood {place}.",
    "{hero} had nothing to do. It was {weather}, so {he} spent the morning {place}.",
    "Once, on a {weather} evening, {hero} was all alone {place}.",
)
SCENERY: Step = (
    "The {thing} was {look}.",
    "The {thing} was {look}, and {hero} took a deep breath.",
    "{He} liked how {look} the {thing} was.",
    "Everything was {look}, even the {thing}.",
)
MEETING: Step = (
    "There {he} met {a_adj} {animal}.",
    "Then {a_adj} {animal} came along.",
    "Soon {he} saw {a_adj} {animal} behind a tree.",
    "{A_adj} {animal} was waiting there and said hello.",
    "All at once {a_adj} {animal} looked up at {him}.",
)
FINDING: Step = (
    "{He} found {a_col} {obj} next to a fence.",
    "Something shone between the leaves. It was {a_col} {obj}.",
    "Right in front of {him} lay {a_col} {obj}.",
    "{He} almost fell over {a_col} {obj}.",
)
CARRYING: Step = (
    "{He} had {a_col} {obj} with {him}.",
    "{He} was carrying {a_col} {obj}.",
    "Under {his} arm {he} held {a_col} {obj}.",
)
CLOSING: Step = (
    "{hero} never forgot that {weather} day.",
    "After that, {hero} and {friend} often talked about the {weather} day.",
    "So the {weather} day ended well for {hero} and the {animal}.",
    "{friend} smiled, and they all walked home together.",
    "The {animal} waved, and {hero} and {friend} went home happy.",
    "That night {hero} dreamed of the {animal}.",
)


@dataclass(frozen=True)
class Plot:
    """One plot: its steps in order, how its numbers are bound, and what a prompt may call it."""

    steps: tuple[Step, ...]
    rule: Rule = "none"
    theme: str = ""


RETURN = Plot(
    theme="giving something back",
    steps=(
        OPENING, SCENERY, FINDING, MEETING,
        (
            '"Whose {obj} is this?" asked {hero}.',
            '{hero} asked, "Is this {col} {obj} yours?"',
            '"Did you lose {a_col} {obj}?" {hero} asked the {animal}.',
        ),
        (
            '"It is not mine," said the {animal}. "I think it belongs to {friend}."',
            'The {animal} shook its head and said, "That must be from {friend}."',
            '"No," said the {animal}, "but {friend} has lost one."',
        ),
        (
            "So {hero} took the {obj} to {friend}.",
            "They looked for {friend} and gave {f_him} the {col} {obj}.",
            "{hero} ran to {friend} with the {obj} in {his} hands.",
        ),
        (
            '{friend} was so glad that {f_he} hugged {hero}.',
            '"My {obj}!" cried {friend}. "Thank you, {hero}!"',
            '"I looked for it all day," said {friend}.',
        ),
        CLOSING,
    ),
)  # fmt: skip
HEAVY = Plot(
    theme="helping each other",
    steps=(
        OPENING, FINDING, SCENERY,
        (
            "{He} wanted to take it home, but it was too heavy.",
            "{hero} tried to lift the {obj}, but it did not move.",
            "The {col} {obj} was much too heavy for {him}.",
        ),
        MEETING,
        (
            'The {animal} said, "I will help you, {hero}."',
            '"Let me pull," said the {animal}.',
            '"Two are stronger than one," said the {animal}.',
        ),
        (
            "They pulled and pulled, but the {obj} stayed where it was.",
            "Even together they could not move the {obj}.",
        ),
        (
            "Then {friend} came by, and {f_he} pushed from behind.",
            "{hero} called {friend}, and {f_he} came at once.",
            'Just then {friend} walked past. "Wait for me!" {f_he} said.',
        ),
        (
            "With three of them the {col} {obj} was easy to move.",
            "Now the {obj} rolled all the way home.",
            "Together {hero}, {friend} and the {animal} carried it home.",
        ),
        CLOSING,
    ),
)  # fmt: skip
LOST = Plot(
    theme="something lost",
    steps=(
        OPENING, CARRYING, SCENERY,
        (
            "But when {he} looked again, the {obj} was gone.",
            "Then the wind took the {col} {obj} away.",
            "After a while {he} could not find the {obj} any more.",
        ),
        (
            "{hero} was sad and sat down on a log.",
            "{hero} looked everywhere and began to cry.",
            '"Where is my {obj}?" said {hero}.',
        ),
        MEETING,
        (
            '"What are you looking for?" asked the {animal}. "For my {col} {obj}," said {hero}.',
            '"I lost my {col} {obj}," {hero} told the {animal}.',
            "{hero} told the {animal} about the {col} {obj}.",
        ),
        (
            'The {animal} said, "{friend} picked it up a moment ago."',
            '"I saw {friend} with it," said the {animal}.',
            'The {animal} thought for a while. "Ask {friend}," it said.',
        ),
        (
            "And really, {friend} came with the {obj} in {f_his} hands.",
            "{friend} had kept the {obj} safe for {hero}.",
            '"Here it is," said {friend}, and {f_he} gave {hero} the {obj}.',
        ),
        CLOSING,
    ),
)  # fmt: skip
GAIN = Plot(
    theme="sharing {unit}", rule="plus",
    steps=(
        OPENING,
        (
            "{He} had {a_col} {obj} with {n} {unit} in it.",
            "{He} was carrying {n} {unit} in {a_col} {obj}.",
            "In {his} {col} {obj} there were {n} {unit}.",
        ),
        SCENERY, MEETING,
        (
            '"What a lot of {unit}!" said the {animal}.',
            '"May I count the {unit}?" asked the {animal}.',
            "The {animal} looked at the {unit} and then at {hero}.",
        ),
        (
            "Then {friend} came and brought {k} more {unit}.",
            "{friend} came along and gave {hero} {k} {unit}.",
            '"I have {k} {unit} for you," said {friend}.',
        ),
        (
            "Now there were {total} {unit} in the {obj}.",
            "{n} and {k} make {total}, so {hero} now had {total} {unit}.",
            'The {animal} counted them all. "{total} {unit}!" it said.',
        ),
        CLOSING,
    ),
)  # fmt: skip
GIVE = Plot(
    theme="giving away {unit}", rule="minus",
    steps=(
        OPENING, SCENERY,
        (
            "{He} had {a_col} {obj} with {n} {unit} in it.",
            "{He} was carrying {n} {unit} in {a_col} {obj}.",
            "In {his} {col} {obj} there were {n} {unit}.",
        ),
        (
            "Then {friend} came by. {F_he} had no {unit} at all.",
            "{hero} saw {friend}, and {f_he} looked sad.",
            '"I would like some {unit} too," said {friend}.',
        ),
        (
            "So {hero} gave {friend} {k} {unit}.",
            '"Take {k} of mine," said {hero}.',
            "{hero} counted out {k} {unit} for {friend}.",
        ),
        (
            "That left {total} {unit} in the {obj}.",
            "{n} minus {k} is {total}, so {hero} still had {total} {unit}.",
            "Now {hero} had {total} {unit}, and that was enough.",
        ),
        MEETING,
        (
            '"That was kind of you," said the {animal}.',
            'The {animal} said, "You are a good friend, {hero}."',
            "The {animal} had seen it all and nodded.",
        ),
        CLOSING,
    ),
)  # fmt: skip
TRADE = Plot(
    theme="a trade",
    steps=(
        OPENING, CARRYING, MEETING,
        (
            '"That is a fine {obj}," said the {animal}.',
            'The {animal} looked at it and said, "How {look}!"',
            '"I know somebody who wants {a_col} {obj}," said the {animal}.',
        ),
        (
            "A little later {friend} came with {a_other}.",
            "Just then {friend} walked by. {F_he} had {a_other}.",
            "On the path they met {friend}, who owned {a_other}.",
        ),
        (
            '"I will give you my {other} for your {obj}," said {friend}.',
            '{friend} asked, "Shall we trade my {other} for your {col} {obj}?"',
            '"Would you like my {other}?" asked {friend}. "I like your {obj}."',
        ),
        (
            "{hero} thought about it and said yes.",
            '"That is fair," said {hero}.',
            "{hero} nodded, and they shook hands.",
        ),
        (
            "So {hero} got the {other}, and {friend} got the {obj}.",
            "Now {friend} had {a_col} {obj}, and {hero} had {a_other}.",
            "{hero} took the {other} and {friend} took the {col} {obj}.",
        ),
        SCENERY, CLOSING,
    ),
)  # fmt: skip
PLOTS_OF_THINGS: Mapping[str, Plot] = {
    "return": RETURN, "heavy": HEAVY, "lost": LOST, "gain": GAIN, "give": GIVE, "trade": TRADE,
}  # fmt: skip
