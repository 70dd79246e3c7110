"""The byte tokenizer, and applications over scripted engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from kdray.model.tokenizer import Tokenizer
from kdray.serve.app import ServeLimits, build_app
from tests.serve.fakes import FakeEngine, byte_tokenizer

BuildApp = Callable[..., FastAPI]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return byte_tokenizer(folder)


@pytest.fixture
def app_of(tokenizer: Tokenizer) -> BuildApp:
    """app_of(engine, limit=value, ...): the application that serves it as "fake"."""

    def build(engine: FakeEngine, **limits: int) -> FastAPI:
        return build_app(engine, tokenizer, "fake", ServeLimits(**limits))

    return build
