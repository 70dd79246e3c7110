"""The byte tokenizer, and applications over scripted engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from kdray.serve.keys import KeyRing
from tests.serve.fakes import FakeEngine, byte_tokenizer

BuildApp = Callable[..., FastAPI]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return byte_tokenizer(folder)


@pytest.fixture
def app_of(tokenizer: Tokenizer) -> BuildApp:
    """app_of(engine, keys, limit=value, ...): the application that serves it as "fake"."""

    def build(engine: FakeEngine, keys: KeyRing | None = None, **limits: Any) -> FastAPI:
        return build_app(engine, tokenizer, "fake", ServeLimits(**limits), keys)

    return build
