"""The command line's words as a config: for faults, and for weights."""

from __future__ import annotations

import argparse

import pytest

from kdray.arguments import add_engine_arguments, engine_config, parse_faults
from kdray.config import EngineConfig, FaultPolicy
from kdray.errors import ConfigError
from kdray.serve.arguments import parse_arguments


def test_what_is_not_named_keeps_its_default() -> None:
    assert parse_faults(None) == FaultPolicy()
    expected = FaultPolicy(step_floor_s=30.0, max_restarts=10)
    assert parse_faults("step_floor_s=30, max_restarts=10") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patience=3", "no 'patience'; it has step_multiple"),
        ("max_restarts=often", "max_restarts must be a number, got 'often'"),
        ("step_floor_s", "step_floor_s must be a number, got ''"),
        ("window_s=0", "window_s must be greater than 0"),
        ("step_multiple=0.5", "step_multiple must be at least 1"),
        ("max_restarts=-1", "max_restarts must be an integer from 0"),
    ],
)
def test_a_wrong_word_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_faults(text)


def test_the_policy_reaches_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    config = engine_config(parser.parse_args(["--faults", "end_timeout_s=5"]))
    assert config.faults == FaultPolicy(end_timeout_s=5.0)


def test_the_drafters_weights_reach_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert engine_config(parser.parse_args([])).draft_weights == "auto"
    assert engine_config(parser.parse_args(["--draft-weights", "int4"])).draft_weights == "int4"
    assert parse_arguments({"draft_weights": "int4"}).config.draft_weights == "int4"
    with pytest.raises(ConfigError, match="draft_weights must be one of auto, int4, got 'int8'"):
        parse_arguments({"draft_weights": "int8"})


def test_where_weights_come_from_reaches_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert engine_config(parser.parse_args([])).load_format == "auto"
    assert engine_config(parser.parse_args(["--load-format", "dummy"])).load_format == "dummy"
    assert parse_arguments({"load_format": "dummy"}).config.load_format == "dummy"
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy, got 'random'"):
        parse_arguments({"load_format": "random"})


def test_the_memory_of_kv_pages_reaches_the_config() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)

    def bytes_of(*words: str) -> int | None:
        return engine_config(parser.parse_args(words)).kv_memory_bytes

    assert bytes_of() is None
    assert bytes_of("--kv-memory", "20 GiB") == 20 << 30
    assert bytes_of("--kv-memory", "1.5GB") == 1_500_000_000
    assert parse_arguments({"kv_memory_bytes": "2147483648"}).config.kv_memory_bytes == 2 << 30
    for wrong in ("20", "a lot", "0 GiB", "-3 GiB", "20 GiBs"):
        with pytest.raises(ConfigError, match=f"such as 20 GiB, got '{wrong}'"):
            bytes_of(f"--kv-memory={wrong}")
    for number in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="kv_memory_bytes must be an integer from 1"):
            EngineConfig(kv_memory_bytes=number)  # type: ignore[arg-type]
