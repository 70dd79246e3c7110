"""More plots: shelter, gift, hiding, a race, a repair."""

from __future__ import annotations

from collections.abc import Mapping

from kdray.demo.text.plots import (
    CARRYING,
    CLOSING,
    FINDING,
    MEETING,
    OPENING,
    PLOTS_OF_THINGS,
    SCENERY,
    Plot,
)

SHELTER = Plot(
    theme="a storm",
    steps=(
        OPENING, CARRYING, MEETING, SCENERY,
        (
            "Suddenly there was thunder, and it began to pour.",
            "Then big drops began to fall.",
            "All at once a storm came up.",
        ),
        (
            '"Quick, we must hide!" cried {hero}.',
            "{hero} and the {animal} began to run.",
            '"I know a dry cave," said the {animal}. "Follow me, {hero}!"',
        ),
        (
            "In the cave they found {friend}, who was cold.",
            "{friend} was already hiding there, and {f_he} was wet all over.",
            "Inside sat {friend}. {F_he} was afraid of the storm.",
        ),
        (
            "{hero} gave {f_him} the {col} {obj}, and {f_he} felt better.",
            "They used the {obj} to keep the water out.",
            '"Hold my {obj}," said {hero}, and {friend} was not afraid any more.',
        ),
        (
            "When it was over, they went outside again.",
            "They told stories until the storm was over.",
            "At last it was dry {place}, and they could leave.",
        ),
        CLOSING,
    ),
)  # fmt: skip
GIFT = Plot(
    theme="a birthday",
    steps=(
        OPENING,
        (
            "It was the birthday of {friend}, and {hero} had no gift yet.",
            "{hero} knew that {friend} had a birthday.",
            '"Today is the birthday of {friend}," thought {hero}.',
        ),
        SCENERY, MEETING,
        (
            '"What does {friend} like?" asked the {animal}.',
            'The {animal} said, "I can help you to find a gift."',
            '"A gift must come from the heart," said the {animal}.',
        ),
        FINDING,
        (
            '"That is the right gift!" said {hero}.',
            "{hero} cleaned the {obj} until it shone.",
            "{hero} and the {animal} put the {obj} into paper.",
        ),
        (
            "{friend} opened it and found the {col} {obj}.",
            '"{A_col} {obj}!" cried {friend}. "Just what I wanted!"',
            "When {friend} saw the {obj}, {f_he} danced with joy.",
        ),
        CLOSING,
    ),
)  # fmt: skip
HIDING = Plot(
    theme="a game",
    steps=(
        OPENING, SCENERY,
        (
            "{friend} wanted to play hide and seek.",
            '"Let us play hide and seek," said {friend}.',
            "{hero} and {friend} played hide and seek.",
        ),
        (
            "{hero} counted to ten, but then {he} could not find {friend}.",
            "{hero} closed {his} eyes, and {friend} ran away to hide.",
            "{friend} was so good at it that {hero} looked for an hour.",
        ),
        MEETING,
        (
            '"Have you seen {friend}?" asked {hero}.',
            '{hero} asked the {animal}, "Where is {friend}?"',
            '"I am looking for {friend}," said {hero} to the {animal}.',
        ),
        (
            '"No, but I saw {a_col} {obj} {spot}," said the {animal}.',
            'The {animal} said, "There is {a_col} {obj} {spot}."',
            '"Look for {a_col} {obj}," said the {animal}. "It is {spot}."',
        ),
        (
            "{hero} ran there and found {friend} behind the {obj}.",
            "And there, beside the {col} {obj}, sat {friend}.",
            "It was true. {friend} had left the {obj} there and was laughing.",
        ),
        (
            '"You had help!" said {friend}.',
            '"Found you, {friend}!" cried {hero}.',
            '"Now it is my turn to hide," said {hero}.',
        ),
        CLOSING,
    ),
)  # fmt: skip
RACE = Plot(
    theme="a race",
    steps=(
        OPENING,
        (
            "{friend} came by and wanted to have a race.",
            '"I am faster than you," said {friend}.',
            "{hero} and {friend} wanted to know who was faster.",
        ),
        MEETING,
        (
            '"I will run too," said the {animal}.',
            'The {animal} asked, "May I join you?"',
            '"The winner gets my {obj}," said the {animal}.',
        ),
        (
            "The prize was {a_col} {obj}.",
            "They put {a_col} {obj} at the end of the path.",
            "Who came first would win {a_col} {obj}.",
        ),
        SCENERY,
        (
            "They ran as fast as they could.",
            "{friend} was ahead, but then {f_he} stopped to rest.",
            "{hero} fell, and {friend} stopped to help {him} up.",
            "The {animal} ran between {hero} and {friend}.",
        ),
        (
            "In the end {hero} won the {col} {obj}.",
            "In the end {friend} won the {col} {obj}.",
            "The {animal} came first and got the {obj}.",
            "They all came in at the same time and shared the {obj}.",
        ),
        CLOSING,
    ),
)  # fmt: skip
REPAIR = Plot(
    theme="something broken",
    steps=(
        OPENING, CARRYING, SCENERY,
        (
            "But {he} fell, and the {obj} broke.",
            "Then the {col} {obj} fell down and broke in two.",
            "{He} dropped it, and now the {obj} had a hole.",
        ),
        MEETING,
        (
            '"Do not cry, {hero}," said the {animal}.',
            'The {animal} said, "{friend} can mend it."',
            '"I know who can help," said the {animal}.',
        ),
        (
            "So they went to {friend}, who was good with {f_his} hands.",
            "They took the broken {obj} to {friend}.",
            "They knocked at the door, and {friend} let them in.",
        ),
        (
            "{friend} worked on the {obj} for an hour.",
            "{friend} took some glue and mended the {col} {obj}.",
            '"That is easy," said {friend}, and {f_he} took {f_his} tools.',
        ),
        (
            "Soon the {obj} was as good as new.",
            "In the end the {col} {obj} was even better than before.",
            '"Thank you, {friend}," said {hero}. "What a fine {obj}!"',
        ),
        CLOSING,
    ),
)  # fmt: skip
PLOTS: Mapping[str, Plot] = {
    **PLOTS_OF_THINGS,
    "shelter": SHELTER, "gift": GIFT, "hiding": HIDING, "race": RACE, "repair": REPAIR,
}  # fmt: skip
