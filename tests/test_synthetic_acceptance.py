"""Rounds that accept at assumed rates: what they gain, that ranks agree, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kdray.arguments import parse_acceptance
from kdray.config import EngineConfig, SyntheticAcceptance
from kdray.core.acceptance import AcceptanceProfile
from kdray.core.plan import DraftTrees
from kdray.core.request import SamplingParams
from kdray.engine import Engine, build_engine, make_request, resolve
from kdray.errors import ConfigError
from kdray.kernels.reference import ReferenceOps
from kdray.serve.arguments import parse_arguments
from kdray.verifier.synthetic import AssumedTokens

CPU = torch.device("cpu")
RATES = SyntheticAcceptance(hits=(0.8, 0.7), siblings=(0.5, 0.2), off_path=0.3)


def config_of(rates: SyntheticAcceptance | None = RATES, **wishes: Any) -> EngineConfig:
    wishes = {"max_requests": 8, "max_model_len": 512, "budget": 12, "device": "cpu", **wishes}
    return EngineConfig(synthetic_acceptance=rates, **wishes)


def accept_lengths(config: EngineConfig, tokens: int = 300) -> tuple[Counter[int], Engine]:
    engine = build_engine(config, resolve(config))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    for n in range(config.max_requests):
        prompt = [7 + n, 8, 9]
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
    assert mean(lengths) == pytest.approx(wanted, abs=0.25)


@pytest.mark.parametrize(("hits", "wanted"), [((0.0,), 1), ((1.0,), 8)])
def test_none_and_all(hits: tuple[float, ...], wanted: int) -> None:
    """A miss is one, though the demo's drafter is mostly right; and nothing misses at rate 1."""
    rates = SyntheticAcceptance(hits=hits, siblings=(), off_path=0.0)
    lengths, _ = accept_lengths(config_of(rates, mode="chain", budget=7), tokens=65)
    assert lengths[wanted] >= 0.95 * lengths.total()  # but for a miss by chance, and the ends


def test_plain_decoding_is_left_alone() -> None:
    config = config_of(mode="plain")
    assert resolve(config).acceptance is None


def test_a_wanted_child_is_accepted_and_a_child_by_chance_is_not() -> None:
    # Roots with three children; behind the first one more. 9: padding.
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
    # The next token behind 11, where it is not wanted: 12, the third child, which is then accepted.
    assert set(roots) == {10, 11, 12}
    assert roots[10] == pytest.approx(200, abs=40) and roots[11] == pytest.approx(100, abs=35)
    assert set(found[:, 1].tolist()) == {11, 13}
    assert (found[:, 2:] == 11).all()
    paths = ReferenceOps(CPU).accept_paths(trees, found, 2)
    on_path = found[:, 0] == 10
    assert paths.length[~on_path].tolist() == [2] * int((~on_path).sum())
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


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"drafter": "none"}, "wants a drafter"),
        ({"graphs": False}, "leave graphs on"),
        ({"rates": SyntheticAcceptance(hits=(0.2,))}, "likelier than the one before"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(**wishes))
