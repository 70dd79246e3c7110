"""The vocabulary of a folder that has none: every token has text, plain text has tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdray.errors import CheckpointError
from kdray.model.chat import encode_chat
from kdray.model.tokenizer import StreamDecoder, Tokenizer
from tests.model import dummy_folders
from tests.model.tiny_tokenizer import write_tokenizer

SIZE = 1024


def folder_of(root: Path, *, vocab_size: int = SIZE, bos: int = 1000, eos: int = 1001) -> Path:
    folder, _ = dummy_folders.write(root, vocab_size=vocab_size)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["bos_token_id"], fields["eos_token_id"] = bos, eos
    fields["text_config"] |= {"bos_token_id": bos, "eos_token_id": eos}
    path.write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(folder_of(tmp_path_factory.mktemp("folder")), "dummy")


def test_every_token_has_text_that_waits_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == SIZE
    decoder = StreamDecoder(tokenizer)
    texts = [decoder.feed([token]) for token in range(SIZE)]
    assert all(texts) and len(set(texts)) == SIZE and decoder.flush() == ""
    assert texts[65] == "A" and texts[300] == " 300" and texts[27] == " 27"
    assert texts[1000] == "<|begin_1000|>" and texts[1001] == "<|end_1001|>"


def test_text_is_its_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hi\n") == [72, 105, 10]
    assert tokenizer.decode(tokenizer.encode("Hi\n")) == "Hi\n"
    assert tokenizer.encode("é字") == list("é字".encode())
    assert tokenizer.encode("\ud800") == [ord("?")]
    assert tokenizer.longest_token == len(" 1000") and tokenizer.end_token_ids == frozenset()


def test_special_tokens_are_not_written_by_plain_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, bos=65, eos=66), "dummy")
    assert tokenizer.encode("@ABC") == [64, 67, 68, 69]
    assert tokenizer.decode([64, 67, 68, 69]) == "@ABC"
    assert tokenizer.encode("<|end_66|>", allow_special=True) == [66]
    assert 66 not in tokenizer.encode("<|end_66|>")


def test_a_vocabulary_of_few_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, vocab_size=64, bos=1, eos=2), "dummy")
    ids = tokenizer.encode("".join(map(chr, range(256))))
    assert set(ids) == set(range(64)) - {1, 2}
    assert all(tokenizer.decode([token]) for token in range(64))


def test_a_chat_is_its_roles_and_words(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be {{ brief }}."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.decode(encode_chat(tokenizer, messages))
    assert prompt == "system: Be {{ brief }}.\nuser: Hi\nassistant: "


def test_a_folder_s_own_tokenizer_is_used(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    own, dummy = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder, "dummy")
    assert dummy.encode("in the") == own.encode("in the") == [256 + 3, 256 + 0]
    assert dummy.chat_template == own.chat_template


def test_without_dummies_a_tokenizer_is_missed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither tiktoken\.model nor tokenizer\.json"):
        Tokenizer.from_folder(folder_of(tmp_path))
