"""Jobs import one another by name, from their own folder; a tokenizer whose tokens are bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

from kdray.model.tokenizer import Tokenizer
from tests.serve.fakes import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return byte_tokenizer(folder)
