"""JSON objects of a model folder, read field by field with errors that name field and file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdray.errors import CheckpointError, UnsupportedModel


class JsonFields:
    """One JSON object whose fields are read with their type checked."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, *, at_least: int = 1, default: int | None = None) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(name, value, f"an integer of at least {at_least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(name, value, "a number greater than 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        value = self.get(name)
        # DeepSeek's own configurations write 0 where an mscale is not wanted.
        return None if value is None or value == 0 else self.number(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def only(self, name: str, allowed: Any) -> None:
        """Absent is fine: transformers drops fields that have one value in the whole family."""
        value = self.get(name, allowed)
        if value != allowed:
            raise self.refusal(f"{name} = {value!r} is not supported, only {allowed!r} is")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def refusal(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}")

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return self.error(f"{name} must be {wanted}, found {value!r}")

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"field {name} is missing")
        return value


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; CheckpointError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give the folder of a downloaded model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(values).__name__}")
    return values
