"""What the demo model knows about kdray: one true sentence or two a topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A question in direct and in indirect order of words."""

    direct: str
    indirect: str


@dataclass(frozen=True)
class Topic:
    """A question and its answer."""

    asked: Asked
    answer: str


def _what_is(name: str, answer: str) -> Topic:
    return Topic(Asked(f"what is {name}", f"what {name} is"), answer)


def _what_does(name: str, answer: str) -> Topic:
    return Topic(Asked(f"what does {name} do", f"what {name} does"), answer)


TOPICS: Mapping[str, Topic] = {
    "kdray": _what_is(
        "kdray",
        "kdray is a Ray job that serves DeepSeek-V3 models with tree speculative decoding.",
    ),
    "target": _what_is("the target", "The target is the large model whose text is served."),
    "drafter": _what_is(
        "the drafter", "The drafter is a small model that proposes tokens for the target to verify."
    ),
    "tree": _what_is(
        "a draft tree",
        "A draft tree holds the most probable continuations. Its root is the last token.",
    ),
    "root": _what_is("the root", "The root is the last token of the text. It has no KV yet."),
    "budget": _what_is(
        "the node budget",
        "The node budget is the number of draft nodes of a tree, without the root.",
    ),
    "accept": _what_is(
        "the accept length",
        "The accept length is the number of accepted drafts plus one, the bonus token included.",
    ),
    "bonus": _what_is(
        "the bonus token",
        "The bonus token is the token that the target adds after the accepted path.",
    ),
    "path": _what_is(
        "a path", "A path is a row of nodes from the root down. One path is accepted."
    ),
    "mask": _what_is(
        "the ancestor mask",
        "The ancestor mask lets each node see the text, its ancestors and itself.",
    ),
    "page": _what_is(
        "a page", "A page is a block of the KV cache. A request owns a table of pages."
    ),
    "gang": _what_is(
        "a gang", "A gang is all the ranks of one model. It starts and fails as a whole."
    ),
    "rank": _what_is("a rank", "A rank is one GPU of a gang. It holds one shard of the target."),
    "round": _what_is(
        "a round", "A round is one speculative step: draft, build, verify, accept and commit."
    ),
    "chain": _what_is("a chain", "A chain is a draft tree with one branch."),
    "features": _what_is(
        "a feature", "A feature is a hidden state of the target that the drafter reads."
    ),
    "ttft": _what_is("TTFT", "TTFT is the time from a request to its first token."),
    "tpot": _what_is("TPOT", "TPOT is the mean time for each further token."),
    "driver": _what_does(
        "the driver",
        "The driver schedules requests, drafts tokens, builds trees and accepts paths.",
    ),
    "verifier": _what_does(
        "a verifier", "A verifier runs one shard of the target on a whole tree."
    ),
    "scheduler": _what_does(
        "the scheduler", "The scheduler decides which requests take part in a step."
    ),
    "verify": _what_does(
        "verify", "Verify runs the target once and gives one token for each node."
    ),
    "commit": _what_does("commit", "Commit moves the KV of the accepted path to its final place."),
    "build": _what_does(
        "build", "Build takes the best prefixes of the draft and makes a tree of them."
    ),
    "ray": _what_does("Ray", "Ray places the actors, watches them and starts them again."),
    "lossless": Topic(
        Asked("why is it lossless", "why it is lossless"),
        "Every token is drawn from the target. The draft only decides how many come in one step.",
    ),
    "sampling": Topic(
        Asked("how are tokens sampled", "how tokens are sampled"),
        "The noise depends on the seed and the position only, so every mode gives the same text.",
    ),
    "mla": Topic(
        Asked("what does MLA mean", "what MLA means"),
        "MLA means multi-head latent attention. It keeps one small vector for each token.",
    ),
    "moe": Topic(
        Asked("what does MoE mean", "what MoE means"),
        "MoE means mixture of experts. Each token visits only a few of them.",
    ),
    "dflash": Topic(
        Asked("how does DFlash draft", "how DFlash drafts"),
        "DFlash fills a whole block of masks at once and reads the features of the target.",
    ),
    "kernels": Topic(
        Asked("where are the kernels", "where the kernels are"),
        "The kernels are in kdray/kernels, one file for each op.",
    ),
    "gpu": Topic(
        Asked("does it need a GPU", "whether it needs a GPU"),
        "No. The same job runs on a CPU with the demo model.",
    ),
    "kimi": Topic(
        Asked("which model is it made for", "which model it is made for"),
        "It is made for Kimi K2 and other models of the DeepSeek-V3 family.",
    ),
    "benefit": Topic(
        Asked("when is a tree better than a chain", "when a tree is better than a chain"),
        "A tree is better when the drafter is not sure and there is time to verify more nodes.",
    ),
}
SMALL_TALK: Mapping[str, tuple[tuple[str, ...], str]] = {
    "hello": (
        ("Hello!", "Hi", "Hello", "Hi there!", "Good morning!", "Hey"),
        "Hello! I am the demo model of kdray. Ask me for a story, a sum or a function.",
    ),
    "who": (
        ("Who are you?", "What are you?", "What is your name?", "Are you Kimi?"),
        "I am the demo model of kdray. I am very small and know only a few things.",
    ),
    "able": (
        ("What can you do?", "Help", "What should I ask you?", "Can you help me?"),
        "I can write short stories, solve small sums, write Python functions and explain kdray.",
    ),
    "thanks": (("Thank you!", "Thanks", "Thanks a lot!", "Great, thank you."), "You are welcome!"),
    "bye": (("Goodbye!", "Bye", "See you later."), "Goodbye, and come back soon!"),
}
