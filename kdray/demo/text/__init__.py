"""The seeded text the demo model was trained on, and its checkers. Standard library only.

Stories (60 %) whose facts bind, word problems (15 %), short Python functions (15 %) and questions
about kdray (10 %); 30 % of the documents have further turns. Facts that are copied or computed with
are uniform; wordings are skewed by a hash of facts. Slot tuples are held out by hash.
"""

from __future__ import annotations

from kdray.demo.text.corpus import check_answer, held_out_prompts, sample_document
from kdray.demo.text.document import KINDS, Document, Exchange, Kind, Turn, Verdict
from kdray.demo.text.functions import check_function
from kdray.demo.text.problems import check_problem
from kdray.demo.text.questions import check_question
from kdray.demo.text.recall import check_recall
from kdray.demo.text.story_check import check_story

__all__ = [
    "KINDS",
    "Document",
    "Exchange",
    "Kind",
    "Turn",
    "Verdict",
    "check_answer",
    "check_function",
    "check_problem",
    "check_question",
    "check_recall",
    "check_story",
    "held_out_prompts",
    "sample_document",
]
