"""The arguments of a deployed application: a YAML's mapping or NAME=VALUE words to dataclasses."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kdray.actors.placement import Placement
from kdray.config import EngineConfig
from kdray.errors import ConfigError
from kdray.serve.admission import ServeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How Ray Serve holds an engine.

    served_name    the model id that clients write; None: the model's own name
    engines        engines behind the endpoint, each with ranks of its own
    ingress_cpus   CPUs reserved for each engine's HTTP process, beside its ranks
    drain_s        how long open requests may run on when an engine is told to stop
    stall_s        an engine with work that makes no step for so long is replaced, its supervisor
                   with it; None: five minutes more than a start may take
    direct_port    a port of the endpoint's own, past Ray Serve's proxy (kdray.serve.direct), on
                   the endpoint's node and its Ray Serve's host; with one engine only
    api_key_file, admin_key_file, keyless   kdray.serve.keys
    """

    served_name: str | None = None
    engines: int = 1
    ingress_cpus: float = 1.0
    drain_s: float = 120.0
    stall_s: float | None = None
    direct_port: int | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    keyless: bool = False

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ConfigError(f"engines must be at least 1, got {self.engines}")
        if self.direct_port is not None and self.engines > 1:
            raise ConfigError(
                "direct_port is one endpoint's: with more engines, leave it out and let Ray Serve "
                "share out their requests"
            )
        if self.direct_port is not None and not 0 < self.direct_port < 1 << 16:
            raise ConfigError(f"direct_port must be 1 to 65535, got {self.direct_port}")
        for name in ("ingress_cpus", "drain_s", "stall_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")

    def patience_s(self, config: EngineConfig) -> float:
        """stall_s, with its default resolved."""
        return config.start_timeout_s + 300.0 if self.stall_s is None else self.stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Everything that `args` of a Serve config may say; every field of these has one name."""

    config: EngineConfig = field(default_factory=EngineConfig)
    placement: Placement = field(default_factory=Placement)
    hosting: Hosting = field(default_factory=Hosting)
    limits: ServeLimits = field(default_factory=ServeLimits)


def parse_arguments(given: Mapping[str, Any]) -> Arguments:
    """Raises ConfigError at a name that is not known or a value of another type."""
    parts = get_type_hints(Arguments)
    names = {item.name for part in parts.values() for item in fields(part)}
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"there is no argument {name!r}{hint}")
    arguments = Arguments(**{key: _part(part, given) for key, part in parts.items()})
    arguments.placement.check(arguments.config)
    return arguments


def _part(part: Any, given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(part)
    own = [item.name for item in fields(part) if item.name in given]
    return part(**{name: _typed(name, given[name], hints[name]) for name in own})


def _typed(name: str, value: object, hint: Any) -> object:
    """The value as its field wants it; what came from a command line is text."""
    wanted = [hint]
    if get_origin(hint) in (Union, UnionType):
        wanted = [option for option in get_args(hint) if option is not type(None)]
        # "auto" as on a command line; of text, such as a file's name, it may be the value.
        open_words = ("none", "null") if wanted[0] is str else ("none", "null", "auto")
        if value is None or str(value).lower() in open_words:
            return None
    kind = get_origin(wanted[0]) or wanted[0]
    try:
        if kind is tuple:
            return _several(value, get_args(wanted[0])[0])
        return _converted(value, kind)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{name} must be {_shown(wanted[0])}, got {value!r}") from None


def _converted(value: object, kind: Any) -> object:
    if is_dataclass(kind):
        return _nested(kind, value)
    if kind is bool:
        return _flag(value)
    if kind is int:
        return _whole(value)
    if kind is float:
        return float(value)  # type: ignore[arg-type]
    return str(value)


def _several(value: object, kind: Any) -> object:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(_converted(part, kind) for part in parts)  # type: ignore[attr-defined]


def _nested(part: Any, value: object) -> object:
    """A dataclass within, such as `faults`, from a mapping of its own."""
    if not isinstance(value, Mapping):
        raise TypeError(value)
    names = {item.name for item in fields(part)}
    for name in value:
        if name not in names:
            raise ConfigError(f"there is no argument {name!r} in {part.__name__}")
    for item in fields(part):
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        if not has_default and item.name not in value:
            raise ConfigError(f"{part.__name__} wants {item.name!r}")
    return _part(part, value)


def _whole(value: object) -> int:
    if isinstance(value, float | bool):
        raise ValueError(value)
    return int(value)  # type: ignore[call-overload, no-any-return]


def _flag(value: object) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _shown(hint: Any) -> str:
    if is_dataclass(hint):
        return "a mapping"
    if get_origin(hint) is tuple:
        return "a list of integers" if int in get_args(hint) else "a list of numbers"
    shown = {bool: "true or false", int: "an integer", float: "a number"}
    return shown.get(hint, "text")
