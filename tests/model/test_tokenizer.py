"""Tokenizer folders, special tokens, and text that arrives in pieces."""

from __future__ import annotations

import builtins
import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from kdray.errors import CheckpointError, InvalidRequest, UnsupportedModel
from kdray.model.tokenizer import StopMatcher, StreamDecoder, Tokenizer
from kdray.model.vocabulary import KIMI_PATTERN
from tests.model.tiny_tokenizer import (
    MERGED,
    NUM_PLAIN,
    VOCAB_SIZE,
    write_ranks,
    write_tokenizer,
)

BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def json_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_json_tokenizer(tmp_path_factory.mktemp("json") / "folder")


@given(text=st.text(max_size=60))
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_follow_ranks(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in the") == [256 + 3, 256 + 0]
    assert tokenizer.encode("你") == [256 + 7]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello World's", ["Hello", " World's"]),
        ("camelCase HTMLText", ["camel", "Case", " HTMLText"]),
        ("I'LL they'd 'tis", ["I'LL", " they'd", " '", "tis"]),
        ("x 12345.678", ["x", " ", "123", "45", ".", "678"]),
        ("好好abc好", ["好好", "abc", "好"]),
        ("한국 да", ["한국", " да"]),
        ("。!?\n\n \n  x", ["。!?\n\n", " \n", " ", " x"]),
        ("a  \n b  ", ["a", "  \n", " b", "  "]),
    ],
)
def test_kimis_pattern_splits_as_described(text: str, pieces: list[str]) -> None:
    assert regex.findall(KIMI_PATTERN, text, flags=regex.VERSION1) == pieces


def test_a_pattern_in_the_config_is_used_instead(tmp_path: Path) -> None:
    digits = write_tokenizer(tmp_path / "digits", pat_str=r"\p{N}|[^\p{N}]+")
    assert pieces_of(Tokenizer.from_folder(digits), "123") == ["1", "2", "3"]
    kimi = write_tokenizer(tmp_path / "kimi")
    assert pieces_of(Tokenizer.from_folder(kimi), "1234") == ["123", "4"]


def test_names_of_special_tokens_are_plain_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    plain = tokenizer.encode(text)
    assert max(plain) < NUM_PLAIN and tokenizer.decode(plain) == text
    end = tokenizer.special_id("<|im_end|>")
    assert tokenizer.encode(text, allow_special=True) == [ord("a"), end, ord("b")]


def test_control_tokens_are_left_out_of_text_and_think_markers_stay(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>x</think>y<|im_end|>", allow_special=True)
    assert tokenizer.decode(ids) == "<think>x</think>y"
    assert tokenizer.decode(ids, skip_special=False) == "<think>x</think>y<|im_end|>"
    assert StreamDecoder(tokenizer).feed(ids) == "<think>x</think>y"


def test_every_id_has_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    reserved = NUM_PLAIN + 5
    assert tokenizer.special_id(f"<|reserved_token_{reserved}|>") == reserved
    for token in range(VOCAB_SIZE):
        assert tokenizer.token_bytes(token, skip_special=False)
    with pytest.raises(ValueError, match="token id"):
        tokenizer.decode([VOCAB_SIZE])


def test_end_tokens_and_roles(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_token_ids == {NUM_PLAIN + 1, NUM_PLAIN + 2}
    assert tokenizer.special_names == {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    with pytest.raises(CheckpointError, match="no special token <missing>"):
        tokenizer.special_id("<missing>")


def test_half_a_surrogate_pair_is_no_error(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_long_unbroken_text_is_cut_where_kimi_cuts_it(tokenizer: Tokenizer) -> None:
    # "th" is a token of lower rank than "he": a cut between t and h shows.
    text = "x" * 24_999 + "the" + " " * 3
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[24_999:25_001] == [ord("t"), 256 + 2]  # t|he, not th|e
    short = tokenizer.encode(text[1_000:])
    assert short[23_999:24_001] == [256 + 1, ord("e")]


def test_very_long_input_comes_back(tokenizer: Tokenizer) -> None:
    text = ("word " * 9 + "\n") * 10_000
    assert len(text) > 400_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("tokens", "first", "said"),
    [
        (BYTES, 1, "rank 0 is missing"),
        ([*BYTES, BYTES[0]], 0, "rank 0 is missing or stands twice"),
        ([*BYTES[1:], b"ab"], 0, "some single byte has no token"),
    ],
)
def test_broken_rank_files_are_refused(
    tmp_path: Path, tokens: list[bytes], first: int, said: str
) -> None:
    folder = write_tokenizer(tmp_path)
    write_ranks(folder, tokens, first)
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.from_folder(folder)


def test_a_line_that_is_no_token_is_named(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "tiktoken.model").write_text("IQ== 0\nnot-base64 1 2\n")
    with pytest.raises(CheckpointError, match="line 2"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ({"5": {"content": "<x>"}}, "<x> has id 5, which is a plain token's"),
        ({str(NUM_PLAIN): {"content": "<x>"}, str(NUM_PLAIN + 1): {"content": "<x>"}}, "two ids"),
        ({str(VOCAB_SIZE): {"content": "<x>"}}, "vocab_size is"),
    ],
)
def test_clashing_special_ids_are_refused(tmp_path: Path, added: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.from_folder(write_tokenizer(tmp_path, added_tokens_decoder=added))


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pat_str is not understood"):
        Tokenizer.from_folder(write_tokenizer(tmp_path, pat_str="(("))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither tiktoken\.model nor tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def write_json_tokenizer(folder: Path, decoder: str = "ByteLevel") -> Path:
    """A byte-level tokenizer.json, trained on a few words."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Fast

    folder.mkdir()
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel() if decoder == "ByteLevel" else decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the end of the tale, the end of it"], trainer)
    fast.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    fast.add_tokens([AddedToken("<think>", special=False)])
    fast.save(str(folder / "tokenizer.json"))
    return folder


@given(text=st.text(alphabet=st.sampled_from("the nd of<|im_>é你\n"), max_size=40))
def test_a_json_tokenizer_reads_text_as_its_library_does(json_folder: Path, text: str) -> None:
    ours, theirs = _json_pair(json_folder)
    ids = ours.encode(text, allow_special=True)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special=False) == text


@cache
def _json_pair(folder: Path) -> tuple[Tokenizer, Any]:
    from tokenizers import Tokenizer as Fast

    return Tokenizer.from_folder(folder), Fast.from_file(str(folder / "tokenizer.json"))


def test_a_json_tokenizer_keeps_special_names_out_of_text(json_folder: Path) -> None:
    ours, _ = _json_pair(json_folder)
    text = "the<|im_end|><think>"
    plain = ours.encode(text)
    assert ours.decode(plain) == text
    assert not set(plain) & {ours.special_id("<|im_end|>"), ours.special_id("<think>")}
    ids = ours.encode(text, allow_special=True)
    assert ours.decode(ids) == "the<think>"
    assert ours.decode(ours.encode("a\ud800")) == "a\ufffd"


def test_a_json_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="byte-level"):
        Tokenizer.from_folder(write_json_tokenizer(tmp_path / "json", decoder="Metaspace"))


def test_without_the_tokenizers_package_the_error_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_json_tokenizer(tmp_path / "json")
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match="pip install tokenizers"):
        Tokenizer.from_folder(folder)


@given(text=st.text(alphabet="aé你🙂", max_size=12), data=st.data())
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = list(text.encode())  # the 256 first tokens are the bytes: characters come in pieces
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    decoder, written = StreamDecoder(tokenizer), ""
    for start, end in pairwise([0, *cuts, len(ids)]):
        written += decoder.feed(ids[start:end])
        assert text.startswith(written)
    assert written + decoder.flush() == text


def test_a_character_cut_short_is_held_back_and_flushed(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    assert decoder.feed(list("é".encode())[:1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.feed([ord("a")]) == "a"


def cut_plainly(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Read one character at a time; stop as soon as a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    st.text(alphabet="ab", max_size=14),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stops_cut_alike_however_the_text_arrives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    matcher, written, stopped = StopMatcher(stops), "", False
    wanted, ends = cut_plainly(text, stops)
    for start, end in pairwise([0, *cuts, len(text)]):
        emit, stopped = matcher.feed(text[start:end])
        written += emit
        assert wanted.startswith(written)
    written += matcher.flush()
    assert (written, stopped) == (wanted, ends)


def test_only_a_possible_beginning_of_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("one ST") == ("one ", False)
    assert matcher.feed("ART S") == ("START ", False)
    assert matcher.feed("TOP two") == ("", True)
    assert matcher.feed("three") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        StopMatcher(["a", ""])
    assert raised.value.param == "stop"


def test_the_folders_template_is_found(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write_tokenizer(tmp_path / "none")).chat_template is None
    one = write_tokenizer(tmp_path / "one", chat_template="one")
    assert Tokenizer.from_folder(one).chat_template == "one"
    (one / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(one).chat_template == "file"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    many = write_tokenizer(tmp_path / "many", chat_template=several)
    assert Tokenizer.from_folder(many).chat_template == "d"


def test_vocab_size_of_a_nested_config(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 400}}))
    assert Tokenizer.from_folder(folder).vocab_size == 400
    (folder / "config.json").unlink()
    assert Tokenizer.from_folder(folder).vocab_size == NUM_PLAIN + 24
    assert len(MERGED) == NUM_PLAIN - 256
