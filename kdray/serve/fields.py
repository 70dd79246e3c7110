"""JSON members, read one at a time with their types checked; null means absent."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn, TypeGuard, TypeVar

from kdray.errors import InvalidRequest

Default = TypeVar("Default")
MAX_INTEGER = 2**63 - 1
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class Fields:
    """The members of one JSON object; a reader returns the default where a member is absent.

    InvalidRequest, with the member's name as `param`, where a member has another type.
    """

    def __init__(self, members: Mapping[str, object], prefix: str = "") -> None:
        self._members = members
        self._prefix = prefix

    def param(self, name: str) -> str:
        """The member's name as a client would write it, parents included."""
        return f"{self._prefix}{name}"

    def raw(self, name: str) -> object:
        return self._members.get(name)

    def flag(self, name: str, default: Default) -> bool | Default:
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else self.refuse(name, "true or false")

    def integer(self, name: str, default: Default) -> int | Default:
        """8.0 is an integer as well, as JSON Schema has it."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if is_integer(value) else self.refuse(name, "an integer of at most 64 bits")

    def number(self, name: str, default: Default) -> float | Default:
        value = self.raw(name)
        if value is None:
            return default
        return float(value) if is_number(value) else self.refuse(name, "a finite number")

    def text(self, name: str, default: Default) -> str | Default:
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self.refuse(name, "a string")

    def items(self, name: str) -> list[object]:
        value = self.raw(name)
        if value is None:
            return []
        return value if isinstance(value, list) else self.refuse(name, "a list")

    def nested(self, name: str) -> Fields:
        """The members of an object; of an empty one where it is absent."""
        value = self.raw(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, f"{self.param(name)}.")

    def members(self) -> Mapping[str, object]:
        return self._members

    def refuse(self, name: str, wanted: str) -> NoReturn:
        param = self.param(name)
        raise InvalidRequest(f"{param} must be {wanted}, got {_shown(self.raw(name))}", param=param)


def parse_object(raw: bytes) -> Fields:
    """A request body's members; InvalidRequest unless it is one strict JSON object in UTF-8."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair fails
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except UnicodeError:
        raise InvalidRequest("the body is not valid Unicode text in UTF-8") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_shown(value)}")
    return Fields(value)


def is_integer(value: object) -> TypeGuard[int]:
    """A whole number of at most 64 bits; true and false are not numbers here."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER


def is_number(value: object) -> TypeGuard[int | float]:
    """A finite number; 1e999, which JSON readers take for infinity, is none."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not is_integer(value) and not isinstance(value, bool):
        return "a longer one"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
