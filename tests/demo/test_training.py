"""The training code: a smoke run ends in loadable files; the modules compute what they claim."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kdray.demo.gates import Gate, Quality, acceptance_gates, quality_gates
from kdray.demo.text import sample_document
from kdray.demo.tokenizer import DemoTokenizer, load_tokenizer
from kdray.demo.training.corpus import pack_corpus
from kdray.demo.training.drafter import DemoDrafter
from kdray.demo.training.export import save_target
from kdray.demo.training.generation import GeneratedTexts, Sampling, generate
from kdray.demo.training.replay import best_prefix_accepts, replay
from kdray.demo.training.run import run, smoke_plan
from kdray.demo.training.shapes import DrafterShape, TargetShape
from kdray.demo.training.steps import Schedule
from kdray.demo.training.target import DemoTarget
from kdray.demo.training.train_target import document_mask, round_to_bf16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("smoke")
    run(smoke_plan(out, seed=3))
    return out


@pytest.fixture(scope="module")
def tokenizer(smoke: Path) -> DemoTokenizer:
    return load_tokenizer(smoke / "target")


@pytest.fixture(scope="module")
def wild_target() -> DemoTarget:
    """An untrained target whose norms, router biases and scales are far from their start."""
    torch.manual_seed(0)
    target = DemoTarget(TargetShape()).eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.mul_(3)
        else:
            parameter.uniform_(0.5, 1.5)
    for router in target.routers():
        router.e_score_correction_bias.uniform_(-0.1, 0.1)
    round_to_bf16(target)
    return target


def test_smoke_run_writes_public_files(smoke: Path) -> None:
    config = json.loads((smoke / "target/config.json").read_text())
    tensors = load_file(smoke / "target/model.safetensors")
    assert config["model_type"] == "deepseek_v3" and config["rope_scaling"]["type"] == "yarn"
    assert tensors["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (256, 128)
    assert tensors["model.layers.5.mlp.shared_experts.up_proj.weight"].shape == (128, 256)
    assert tensors["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    draft = json.loads((smoke / "drafter/config.json").read_text())
    drafted = load_file(smoke / "drafter/model.safetensors")
    assert draft["dflash_config"] == {"mask_token_id": 2046, "target_layer_ids": [1, 3, 4, 5]}
    assert drafted["fc.weight"].shape == (256, 1024)
    assert set(drafted) == drafter_names(draft["num_hidden_layers"])
    curves = json.loads((smoke / "curves.json").read_text())
    assert curves["target"]["losses"]["nats_per_token"]
    assert {gate["name"] for gate in json.loads((smoke / "figures.json").read_text())["gates"]}


def drafter_names(layers: int) -> set[str]:
    inner = [f"self_attn.{p}_proj" for p in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    inner += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    inner += ["input_layernorm", "post_attention_layernorm"]
    outer = {"norm.weight", "fc.weight", "hidden_norm.weight"}
    return outer | {f"layers.{i}.{name}.weight" for i in range(layers) for name in inner}


def test_mask_row_is_written_into_the_target(
    wild_target: DemoTarget, tokenizer: DemoTokenizer, tmp_path: Path
) -> None:
    row = torch.linspace(-1, 1, 256)[None]
    save_target(wild_target, tokenizer, row, tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table[tokenizer.special_ids["[UNK]"]], row[0].bfloat16())
    assert torch.equal(table[:2046], wild_target.embed_tokens.weight[:2046].bfloat16())


def test_transformers_computes_the_same(
    wild_target: DemoTarget, tokenizer: DemoTokenizer, tmp_path: Path
) -> None:
    save_target(wild_target, tokenizer, wild_target.embed_tokens.weight[-2:-1], tmp_path)
    public = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(public).__name__ == "DeepseekV3ForCausalLM"
    tokens = torch.randint(0, 1900, (2, 160), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = public(tokens, output_hidden_states=True)
        found = wild_target(tokens)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=0)
    for layer in range(5):
        hidden = expected.hidden_states[layer + 1]
        torch.testing.assert_close(found.features[layer], hidden, atol=1e-4, rtol=0)


def test_packed_documents_do_not_see_each_other(
    wild_target: DemoTarget, tokenizer: DemoTokenizer
) -> None:
    corpus = pack_corpus(tokenizer, seed=1, documents=8, processes=1)
    row = int((corpus.segment == 2).any(1).nonzero()[0])
    tokens, segment = corpus.tokens[row][None].long(), corpus.segment[row][None]
    second = (segment[0] == 2).nonzero()[:, 0]
    with torch.no_grad():
        packed = wild_target(tokens, document_mask(segment)).logits[0, second]
        alone = wild_target(tokens[:, second]).logits[0]
    torch.testing.assert_close(packed, alone, atol=1e-3, rtol=0)


def test_packing_keeps_every_document_whole(tokenizer: DemoTokenizer) -> None:
    corpus = pack_corpus(tokenizer, seed=5, documents=40, processes=1)
    packed = sorted(
        tuple(corpus.tokens[row][corpus.segment[row] == number].tolist())
        for row in range(len(corpus.tokens))
        for number in range(1, int(corpus.segment[row].max()) + 1)
    )
    from kdray.demo.training.shapes import seed_of

    rng = random.Random(seed_of(5, "corpus 0"))
    whole = sorted(tuple(tokenizer.encode_turns(sample_document(rng).turns)[0]) for _ in range(40))
    assert packed == whole


def test_decoding_follows_the_full_forward(
    wild_target: DemoTarget, tokenizer: DemoTokenizer
) -> None:
    prompts = [list(range(300, 320)), list(range(500, 533))]
    texts = generate(wild_target, prompts, Sampling(torch.zeros(2), 64), tokenizer)
    with torch.no_grad():
        best = wild_target(texts.tokens).logits.argmax(-1)
    for row, prompt in enumerate(prompts):
        end = int(texts.end[row])
        assert texts.tokens[row, : len(prompt)].tolist() == prompt
        assert torch.equal(
            texts.tokens[row, len(prompt) : end], best[row, len(prompt) - 1 : end - 1]
        )


def test_drafts_do_not_depend_on_what_follows_the_root(wild_target: DemoTarget) -> None:
    torch.manual_seed(2)
    drafter = DemoDrafter(DrafterShape()).eval().requires_grad_(False)
    tokens = torch.randint(0, 1900, (1, 40))
    changed = tokens.clone()
    changed[:, 21:] = torch.randint(0, 1900, (1, 19))
    roots = torch.tensor([[12, 20]])
    first = drafter(wild_target, tokens, wild_target(tokens).features, roots)
    second = drafter(wild_target, changed, wild_target(changed).features, roots)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)
    alone = drafter(wild_target, tokens, wild_target(tokens).features, roots[:, 1:])
    torch.testing.assert_close(first[:, 1:], alone, atol=1e-4, rtol=0)


def test_best_prefixes_are_the_best_by_brute_force() -> None:
    torch.manual_seed(3)
    depth, width, budgets = 3, 4, (1, 3, 6, 12)
    scores = torch.randn(20, depth, width).log_softmax(-1).sort(-1, descending=True).values
    truth = torch.randint(0, width, (20, depth))
    right = torch.nn.functional.one_hot(truth, width).bool()
    found = best_prefix_accepts(scores, right, budgets)
    for row in range(20):
        ranked = sorted(
            (ranks for length in range(1, depth + 1) for ranks in prefixes(length, width)),
            key=lambda ranks: -prefix_score(scores[row], ranks),
        )
        for budget in budgets:
            kept = set(ranked[:budget])
            path = tuple(truth[row].tolist())
            expected = max((n for n in range(depth + 1) if n == 0 or path[:n] in kept), default=0)
            assert int(found[budget][row]) == expected


def prefixes(length: int, width: int) -> Iterator[tuple[int, ...]]:
    yield from product(range(width), repeat=length)


def prefix_score(scores: Tensor, ranks: tuple[int, ...]) -> float:
    return sum(float(scores[level, rank]) for level, rank in enumerate(ranks))


def test_replay_commits_every_token_once(wild_target: DemoTarget) -> None:
    torch.manual_seed(4)
    drafter = DemoDrafter(DrafterShape()).eval().requires_grad_(False)
    tokens = torch.randint(0, 1900, (3, 48))
    texts = GeneratedTexts(tokens, torch.tensor([10, 20, 5]), torch.tensor([30, 48, 40]))
    for rounds in replay(wild_target, drafter, texts, budgets=(4, 8)).values():
        # The prompt's own pass gives the first token, rounds give the others.
        assert torch.equal(rounds.tokens, texts.end - texts.prompt - 1)
        assert bool((rounds.rounds >= 1).all()) and bool((rounds.rounds <= rounds.tokens).all())


def test_schedule_warms_up_and_falls_to_its_floor() -> None:
    schedule = Schedule(peak=1.0, warmup=10, floor=0.02)
    rates = [schedule.rate(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.02)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_gates_pass_and_fail_by_their_limits() -> None:
    assert Gate("x", 4.0, 3.0, 6.0).passed and not Gate("x", 6.5, 3.0, 6.0).passed
    quality = Quality("story", 400, 0.88, 0.89, 300, 0.25)
    assert [gate.passed for gate in quality_gates({"story": quality})] == [False]
    lengths = {"chain_7": {"story": 4.0, "all": 4.2}, "tree_16": {"story": 4.8, "all": 4.5}}
    verdicts = {gate.name: gate.passed for gate in acceptance_gates({0.0: lengths, 0.8: lengths})}
    assert verdicts["story tree of 16 / chain, T=0"]
    assert not verdicts["pooled tree of 16 / chain, T=0.8"]
