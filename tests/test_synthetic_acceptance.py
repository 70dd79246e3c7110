"""Rounds that accept at assumed rates: what they gain, that ranks agree, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kdray.arguments import parse_acceptance
from kdray.config import EngineConfig, SyntheticAcceptance
from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import DraftTrees
from kdray.core.request import SamplingParams
from kdray.driver.turns import PromptTurns
from kdray.engine import Engine, build_engine, make_request, resolve
from kdray.errors import ConfigError
from kdray.kernels.reference import ReferenceOps
from kdray.serve.arguments import parse_arguments
from kdray.verifier.synthetic import DRAWS, NO_CHILD, AssumedTokens, _paths

CPU = torch.device("cpu")
RATES = SyntheticAcceptance(hits=(0.8, 0.7), siblings=(0.5, 0.2), off_path=0.3)


def config_of(rates: SyntheticAcceptance | None = RATES, **wishes: Any) -> EngineConfig:
    wishes = {"max_requests": 8, "max_model_len": 512, "budget": 12, "device": "cpu", **wishes}
    return EngineConfig(synthetic_acceptance=rates, **wishes)


def accept_lengths(config: EngineConfig, tokens: int = 300) -> tuple[Counter[int], Engine]:
    engine = build_engine(config, resolve(config))
    engine.driver.prompt_turns = PromptTurns(lambda: 0.0)  # the same steps in every run
    for n in range(config.max_requests):
        prompt = [7 + n, 8, 9]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=977 * n + 5)
        engine.driver.submit(make_request(f"r{n}", prompt, sampling, engine.facts))
    while engine.driver.step() is not None:
        pass
    return engine.driver.counters.accept_lengths, engine


def mean(lengths: Counter[int]) -> float:
    return sum(length * count for length, count in lengths.items()) / lengths.total()


@pytest.mark.parametrize("wishes", [
    {}, {"budget": 4}, {"mode": "chain", "budget": 7}, {"mode": "chain", "budget": 2},
    {"candidates": 2},
], ids=str)  # fmt: skip
def test_steps_gain_what_the_profile_says(wishes: dict[str, Any]) -> None:
    config = config_of(**wishes)
    lengths, engine = accept_lengths(config)
    profile = engine.facts.acceptance
    assert profile is not None
    if config.candidates == 2:
        profile = AcceptanceProfile(marginals=profile.marginals[:, :2], off_path=profile.off_path)
    wanted = profile.length(config.mode, 1 + config.budget)
    # Some 700 steps of a spread of about 2: a standard error of 0.08.
    assert lengths.total() > 500
    assert mean(lengths) == pytest.approx(wanted, abs=0.16)


def test_candidates_hold_as_often_as_the_profile_says() -> None:
    profile = AcceptanceProfile.of((0.8, 0.7), (0.5, 0.2), 0.3, depth=3)
    paths = _paths(profile)
    assert paths.shape == (DRAWS, 3)
    on_path = np.ones(DRAWS, dtype=bool)
    for depth in range(3):
        for rank in range(3):
            share = (paths[on_path, depth] == rank).mean()
            assert share == pytest.approx(profile.marginals[depth, rank], abs=0.01)
            if depth > 0:
                share = (paths[~on_path, depth] == rank).mean()
                assert share == pytest.approx(profile.behind_siblings[depth, rank], abs=0.01)
        on_path &= paths[:, depth] == 0
    assert set(np.unique(paths)) == {0, 1, 2, NO_CHILD}


@pytest.mark.parametrize(("hits", "wanted"), [((0.0,), 1), ((1.0,), 8)])
def test_none_and_all(hits: tuple[float, ...], wanted: int) -> None:
    """A miss is one, though the demo's drafter is mostly right; and nothing misses at rate 1."""
    rates = SyntheticAcceptance(hits=hits, siblings=(), off_path=0.0)
    lengths, _ = accept_lengths(config_of(rates, mode="chain", budget=7), tokens=65)
    assert lengths[wanted] >= 0.95 * lengths.total()  # but for a miss by chance, and the ends


def test_plain_decoding_is_left_alone() -> None:
    assert resolve(config_of(mode="plain")).acceptance is None
    assert resolve(config_of(mode="plain", graphs=False)).acceptance is None


def test_a_chains_low_rates_meet_no_siblings() -> None:
    facts = resolve(config_of(SyntheticAcceptance(hits=(0.1,)), mode="chain"))
    assert facts.acceptance is not None and facts.acceptance.marginals.shape[1] == 1


def test_a_full_vocabulary_leaves_the_least_token() -> None:
    """Where the tree has the last token, what none of its nodes has is before its first."""
    token = torch.tensor([[5, 19]], dtype=torch.int32)
    trees = DraftTrees(
        token=token,
        parent=torch.tensor([[-1, 0]], dtype=torch.int32),
        depth=torch.tensor([[0, 1]], dtype=torch.int32),
        score=token,
        mask=token[:, :, None],
        num_nodes=torch.tensor([2], dtype=torch.int32),
    )
    never = AssumedTokens(AcceptanceProfile.of((0.0,), (), 0.0, 1), vocab=20, device=CPU)
    said = torch.full_like(token, 19)
    found = never.tokens(trees, said, torch.zeros(1, dtype=torch.int32), torch.zeros(1).long())
    assert found[0, 0] == 4


def test_a_wanted_child_is_accepted_and_a_child_by_chance_is_not() -> None:
    # Roots with three children; behind the first one more. 9: padding. The roots' own token, 11, is
    # their second child's, so where it is not wanted another takes its place: 14, which none has.
    token = torch.tensor([[5, 10, 11, 12, 13, 9]], dtype=torch.int32).repeat(400, 1)
    trees = DraftTrees(
        token=token,
        parent=torch.tensor([[-1, 0, 0, 0, 1, 99]], dtype=torch.int32).repeat(400, 1),
        depth=torch.tensor([[0, 1, 1, 1, 2, 99]], dtype=torch.int32).repeat(400, 1),
        score=token,
        mask=token[:, :, None],
        num_nodes=torch.full((400,), 5, dtype=torch.int32),
    )
    profile = AcceptanceProfile.of((0.5,), (0.5, 0.25), 0.5, depth=2)
    assumed = AssumedTokens(profile, vocab=20, device=CPU)
    said = torch.full_like(token, 11)
    place = torch.arange(400, dtype=torch.int32) * 3
    found = assumed.tokens(trees, said, place, torch.arange(400))
    roots = Counter(found[:, 0].tolist())
    assert set(roots) == {10, 11, 12, 14}
    assert roots[10] == pytest.approx(200, abs=40) and roots[11] == pytest.approx(100, abs=35)
    assert roots[12] == pytest.approx(50, abs=25)
    assert set(found[:, 1].tolist()) == {11, 13}
    assert (found[:, 2:] == 11).all()
    paths = ReferenceOps(CPU).accept_paths(trees, found, 2)
    on_path = found[:, 0] == 10
    missed = found[:, 0] == 14
    assert set(paths.length[missed].tolist()) == {1}
    assert set(paths.length[~on_path & ~missed].tolist()) == {2}
    assert set(paths.length[on_path].tolist()) == {2, 3}
    again = assumed.tokens(trees, said, place, torch.arange(400))
    assert torch.equal(found, again)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.6", SyntheticAcceptance(hits=(0.6,))),
        ("0.8,0.7/0.5", SyntheticAcceptance(hits=(0.8, 0.7), siblings=(0.5,))),
        ("0.8//0", SyntheticAcceptance(hits=(0.8,), siblings=(), off_path=0.0)),
        ("0.8/0.5,0.2/0.3", SyntheticAcceptance(hits=(0.8,), siblings=(0.5, 0.2), off_path=0.3)),
    ],
)
def test_the_command_lines_rates(text: str, wanted: SyntheticAcceptance) -> None:
    assert parse_acceptance(text) == wanted
    assert parse_acceptance(None) is None


@pytest.mark.parametrize("text", ["", "a", "0.5/0.1/0.2/0.3", "0.5/0.1/0.2,0.3", "1.5", "0.5/0.1/"])
def test_rates_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"synthetic[-_]acceptance"):
        parse_acceptance(text)


def test_a_served_engines_rates_are_a_mapping() -> None:
    given = {"synthetic_acceptance": {"hits": [0.7, 0.6], "off_path": 0.1}}
    wanted = SyntheticAcceptance(hits=(0.7, 0.6), off_path=0.1)
    assert parse_arguments(given).config.synthetic_acceptance == wanted
    with pytest.raises(ConfigError, match="wants 'hits'"):
        parse_arguments({"synthetic_acceptance": {"siblings": [0.3]}})


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"drafter": "none"}, "wants a drafter"),
        ({"graphs": False}, "leave graphs on"),
        ({"rates": SyntheticAcceptance(hits=(0.2,))}, "give smaller rates of siblings, or none"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(**wishes))
