"""Ways of decoding that part: a fault is bad, what rounding or a choice of experts does is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import causes
import numpy as np
import pytest
import torch
from causes import LEAST, SHAPES, WHOLE, exact_passes
from decode_ways import Decoded, build_alone, decode, draw_visits, plain_engine
from dequantised import load_reference
from full_width_judge import Finding, Judge
from full_width_rank import findings
from plain_passes import Passed, PlainPasses, Shape
from torch import Tensor
from traffic import Reply, Visit

from kdray.config import EngineConfig
from kdray.core.request import SamplingParams
from kdray.kernels.latent_rows import RowFormat
from kdray.kernels.ops import load_ops
from kdray.model.moe import PackedMoE
from kdray.model.target import TargetModel
from kdray.verifier.verifier import Verifier
from tests.jobs.wide_cases import TOKENS, VOCAB, config_of, write_wide

BIAS = 60.0  # puts a pair in front of all other tokens
Pair = tuple[int, int]


class Setting(NamedTuple):
    config: EngineConfig
    verifier: Verifier
    row: RowFormat
    reference: TargetModel

    def plain(self, visits: list[Visit]) -> Decoded:
        return decode(plain_engine(self.config, self.verifier), visits)

    def judge(self, visits: list[Visit], plain: Decoded) -> Judge:
        return Judge(self.verifier.model, self.reference, self.row, visits, plain, error=0.0)

    def passes(self) -> PlainPasses:
        return PlainPasses.of(self.verifier.model, self.row, nudges_own=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_wide(tmp_path_factory.mktemp("wide"))


def setting_of(folder: Path, dtype: str, *, rounded: bool) -> Iterator[Setting]:
    config = config_of(folder, dtype)
    engine, verifier = build_alone(config)
    reference = load_reference(folder / "target", torch.device("cpu"), rounded=rounded)
    yield Setting(config, verifier, engine.facts.kv_row, reference)
    engine.driver.close()


@pytest.fixture(scope="module")
def packed(folder: Path) -> Iterator[Setting]:
    """bfloat16 with INT4 experts, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kdray.model.weights.experts_stay_packed", lambda *_: True)
        yield from setting_of(folder, "bfloat16", rounded=False)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Setting]:
    yield from setting_of(folder, "float32", rounded=True)


def changed(plain: Decoded, change: dict[int, list[int]]) -> Decoded:
    replies = [
        Reply(change.get(n, reply.token_ids), reply.finish_reason)
        for n, reply in enumerate(plain.replies)
    ]
    return Decoded(replies, 1.0, 0.0)


def with_wrong_token(said: Sequence[int], at: int) -> list[int]:
    other = next(token for token in TOKENS if token != said[at])
    return [*said[:at], other, *said[at + 1 :]]


def bad_verdicts(found: Sequence[Finding]) -> list[object]:
    """Of each parting; the line of all ways is bad where one of them is."""
    whole, *far = found
    assert whole.good == all(finding.good for finding in far)
    assert all(finding.good != (finding.params["verdict"] == "unexplained") for finding in far)
    return [finding.params["request"] for finding in far if not finding.good]


def test_a_token_that_was_no_near_tie_shows(
    exact: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "SHAPES", SHAPES[:LEAST])
    visits = draw_visits(TOKENS, count=4, length=10, seed=1)
    plain = exact.plain(visits)
    judge = exact.judge(visits, plain)
    assert judge.against_reference().good
    [none] = judge.against_plain("tree", plain)
    assert none.good and none.metrics["differing"] == 0
    said = [reply.token_ids for reply in plain.replies]
    for n in range(4):  # greedy and drawn
        wrong = changed(plain, {n: with_wrong_token(said[n], 2)})
        assert bad_verdicts(list(judge.against_plain("tree", wrong))) == [n]
    short = list(judge.against_plain("tree", changed(plain, {1: said[1][:-1]})))
    assert bad_verdicts(short) == [1] and short[1].metrics["position"] == len(said[1]) - 1


def test_all_passes_reach_no_wrong_token(packed: Setting) -> None:
    """Of a reply that is drawn."""
    visits = draw_visits(TOKENS, count=2, length=8, seed=1)
    plain = packed.plain(visits)
    assert any(isinstance(layer.mlp, PackedMoE) for layer in packed.verifier.model.layers)
    assert visits[1].sampling.temperature > 0
    judge = packed.judge(visits, plain)
    wrong = with_wrong_token(plain.replies[1].token_ids, 2)
    whole, far = judge.against_plain("tree", changed(plain, {1: wrong}))
    assert bad_verdicts([whole, far]) == [1]
    figures = far.metrics
    assert figures["position"] == 2 and figures["passes"] == len(SHAPES)
    assert figures["passes_reaching"] == 0 and figures["margin"] > judge.near_tie
    assert figures["lead_lowest"] <= figures["lead_highest"]


def test_a_cache_that_holds_another_token_shows(
    packed: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies that saw one other token in their prompts."""
    monkeypatch.setattr(causes, "SHAPES", SHAPES[:LEAST])
    visits = draw_visits(TOKENS, count=2, length=4, seed=2)
    judge = packed.judge(visits, packed.plain(visits))
    faulty = [replace(v, prompt=(with_wrong_token(v.prompt, 1)[1], *v.prompt[1:])) for v in visits]
    found = list(judge.against_plain("tree", packed.plain(faulty)))
    assert bad_verdicts(found)


class Flip(NamedTuple):
    """A prompt at whose end rounding decides between experts, and the pair that it moves most.

    leads   of the first token over the other, pass by pass
    """

    prompt: tuple[int, ...]
    pair: Pair
    leads: list[float]

    def visit(self, shift: float = 0.0) -> Visit:
        """Whose bias puts the pair level, and then apart by the shift, in front of all others."""
        a, b = self.pair
        level = (min(self.leads) + max(self.leads)) / 2
        bias = ((a, BIAS + shift), (b, BIAS + level))
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, logit_bias=bias)
        return Visit(prompt=self.prompt, sampling=sampling, pause=0, patience=None)


@pytest.fixture(scope="module")
def flip(packed: Setting) -> Flip:
    """Of many prompts of tokens that the router is not sure of, the one with the narrowest gap."""
    dice = np.random.default_rng(0)
    unsure = [token for token in range(VOCAB) if token not in TOKENS]
    prompts = [tuple(int(token) for token in dice.choice(unsure, 12)) for _ in range(100)]
    reference, passes = exact_passes(packed.reference), packed.passes()
    prompt = min(prompts, key=lambda p: float(reference.run(p, WHOLE).gap[:, -1].min()))
    logits = np.stack([passes.run(prompt, shape).logits for shape in SHAPES[:LEAST]])
    spread = np.ptp(logits[:, :, None] - logits[:, None], axis=0)
    a, b = (int(token) for token in np.unravel_index(spread.argmax(), spread.shape))
    return Flip(prompt, (a, b), [float(lead) for lead in logits[:, a] - logits[:, b]])


def part(setting: Setting, visit: Visit, pair: Pair) -> tuple[Judge, Decoded]:
    """A judge of what is said plainly, one of the pair, and a way that says the other."""
    plain = setting.plain([visit])
    [said] = plain.replies[0].token_ids
    assert said in pair
    return setting.judge([visit], plain), changed(plain, {0: [pair[said == pair[0]]]})


def test_experts_that_rounding_chooses_explain_a_parting(packed: Setting, flip: Flip) -> None:
    judge, way = part(packed, flip.visit(), flip.pair)
    whole, far = judge.against_plain("tree", way)
    assert whole.good and whole.metrics["greatest_margin"] > judge.near_tie
    assert far.good and far.params["verdict"] == "experts"
    figures = far.metrics
    assert figures["lead_lowest"] < 0 < figures["lead_highest"] and figures["passes_reaching"] > 0
    assert figures["flips"] > 0 and figures["first_gap"] < 0.01
    assert figures["error"] < judge.near_tie < figures["margin"]


def test_a_pair_further_apart_than_they_move_it_is_not_explained(
    packed: Setting, flip: Flip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "SHAPES", SHAPES[: LEAST + 20])
    shift = max(flip.leads) - min(flip.leads)
    judge, way = part(packed, flip.visit(shift), flip.pair)
    assert bad_verdicts(list(judge.against_plain("tree", way))) == [0]


class WrongInTrees:
    """Passes whose op gives a token more in one shape."""

    def __init__(self, passes: PlainPasses, token: int) -> None:
        self._passes = passes
        self._token = token

    def run(self, text: Sequence[int], shape: Shape, told: Tensor | None = None) -> Passed:
        passed = self._passes.run(text, shape, told)
        if shape.way == "tree":
            passed.logits[self._token] += 2 * BIAS
        return passed


def test_a_pass_that_is_wrong_itself_explains_nothing(packed: Setting) -> None:
    visits = draw_visits(TOKENS, count=1, length=4, seed=1)
    plain = packed.plain(visits)
    said = with_wrong_token(plain.replies[0].token_ids, 2)
    judge = packed.judge(visits, plain)
    judge._causes.passes = WrongInTrees(packed.passes(), said[2])  # type: ignore[assignment]
    whole, far = judge.against_plain("tree", changed(plain, {0: said}))
    assert far.metrics["passes_reaching"] > 0 and far.metrics["error"] > judge.near_tie
    assert bad_verdicts([whole, far]) == [0]


def test_a_parting_of_any_way_is_among_all_findings(
    exact: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causes, "SHAPES", SHAPES[:LEAST])
    visits = draw_visits(TOKENS, count=2, length=8, seed=1)
    plain = exact.plain(visits)
    wrong = changed(plain, {1: with_wrong_token(plain.replies[1].token_ids, 2)})
    ways = {"tree, 2 ranks": wrong, "tree, 3 ranks": plain}
    found = list(findings(exact.config, TOKENS, visits, ways, None))
    bad = [finding.params for finding in found if not finding.good]
    pair = {"one": "tree, 2 ranks", "other": "plain, 1 rank"}
    assert bad == [pair, {**pair, "request": 1, "verdict": "unexplained"}]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_pass_is_as_exact_by_the_experts_it_visits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr("kdray.model.weights.experts_stay_packed", lambda *_: True)
    target, dtype = folder / "target", torch.bfloat16
    model = TargetModel.load(target, ops=load_ops(device), dtype=dtype, device=device)
    assert isinstance(model.layers[-1].mlp, PackedMoE)
    sizes = model.config
    row = RowFormat.of(sizes.kv_lora_rank, sizes.qk_rope_head_dim, dtype)
    passes = PlainPasses.of(model, row, nudges_own=True)
    reference = exact_passes(load_reference(target, torch.device(device), rounded=False))
    text = [*TOKENS[:20], *range(VOCAB)[-12:]]
    found = set()
    for shape in SHAPES[: LEAST + 6]:
        passed = passes.run(text, shape)
        wanted = reference.run(text, WHOLE, passed.expert)
        assert torch.equal(wanted.expert, passed.expert)
        assert np.abs(passed.logits - wanted.logits).max() < 0.1 * wanted.logits.std(), shape
        found.add(passed.logits.tobytes())
    assert len(found) > 6  # by order and by nudge
