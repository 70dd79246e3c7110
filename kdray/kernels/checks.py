"""Shapes, dtypes, devices and contiguity, checked where a kernel is entered.

A kernel reads raw memory: what a wrong shape would cost there is an error with names here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Spec = str | Mapping[str, str]

OPTIONAL = "?"


def check(**specs: Spec) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function with what its tensor arguments must be.

        @check(token="R N int32", logits="? R V float", trees={"mask": "R N W int32"})

    A spec is a parameter's shape, then its dtype if that matters ("float" is any floating one). A
    letter stands for one size, the same in every spec of the call; a number for itself. A leading
    "?" allows None. A mapping names attributes of an argument. All tensors must be contiguous and
    lie on one device. Raises TypeError for what is no tensor, ValueError for the rest.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        rules = _rules(function, specs)

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            sizes: dict[str, int] = {}
            device: torch.device | None = None
            for rule in rules:
                tensor = rule.find(args, kwargs)
                if tensor is not None:
                    rule.apply(tensor, sizes, device)
                    device = tensor.device
            return function(*args, **kwargs)

        return checked

    return decorate


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one tensor must be, and where among the arguments it is found."""

    function: str
    name: str
    parameter: str
    place: int
    read: Callable[[Any], Any]
    shape: tuple[str, ...]
    dtypes: frozenset[torch.dtype]
    optional: bool

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        if self.parameter in kwargs:
            value = self.read(kwargs[self.parameter])
        else:
            value = self.read(args[self.place]) if self.place < len(args) else None
        if value is None and self.optional:
            return None
        if not isinstance(value, Tensor):
            raise TypeError(f"{self} must be a tensor, got {type(value).__name__}")
        return value

    def apply(self, tensor: Tensor, sizes: dict[str, int], device: torch.device | None) -> None:
        """Check `tensor` against the sizes met so far, and add its own to them."""
        if tensor.dim() != len(self.shape):
            raise ValueError(f"{self} must be {self._wanted(sizes)}, got {list(tensor.shape)}")
        for letter, size in zip(self.shape, tensor.shape, strict=True):
            if size != (int(letter) if letter.isdigit() else sizes.setdefault(letter, size)):
                raise ValueError(f"{self} must be {self._wanted(sizes)}, got {list(tensor.shape)}")
        if self.dtypes and tensor.dtype not in self.dtypes:
            wanted = " or ".join(sorted(str(dtype) for dtype in self.dtypes))
            raise ValueError(f"{self} must be {wanted}, got {tensor.dtype}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{self} is on {tensor.device}, the arguments before it on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{self} must be contiguous; pass {self.name}.contiguous()")

    def _wanted(self, sizes: Mapping[str, int]) -> str:
        cells = [f"{s}={sizes[s]}" if s in sizes else s for s in self.shape]
        return f"[{', '.join(cells)}]"

    def __str__(self) -> str:
        return f"{self.function}: {self.name}"


def _rules(function: Callable[..., Any], specs: Mapping[str, Spec]) -> list[_Rule]:
    places = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
    rules = []
    for parameter, spec in specs.items():
        if parameter not in places:
            raise TypeError(f"{function.__name__} has no parameter {parameter!r} to check")
        parts = {"": spec} if isinstance(spec, str) else spec
        for attribute, text in parts.items():
            shape, dtypes, optional = _parse(text)
            rules.append(
                _Rule(
                    function=function.__name__,
                    name=f"{parameter}.{attribute}" if attribute else parameter,
                    parameter=parameter,
                    place=places[parameter],
                    read=attrgetter(attribute) if attribute else _itself,
                    shape=shape,
                    dtypes=dtypes,
                    optional=optional,
                )
            )
    return rules


def _itself(value: Any) -> Any:
    return value


def _parse(text: str) -> tuple[tuple[str, ...], frozenset[torch.dtype], bool]:
    """Shape, dtypes allowed (none: all), and whether None will do."""
    words = text.split()
    optional = words[:1] == [OPTIONAL]
    words = words[1:] if optional else words
    dtypes = _dtypes(words[-1]) if words else frozenset()
    return tuple(words[:-1] if dtypes else words), dtypes, optional


def _dtypes(word: str) -> frozenset[torch.dtype]:
    if word == "float":
        return frozenset((torch.float32, torch.bfloat16, torch.float16))
    dtype = getattr(torch, word, None)
    return frozenset((dtype,)) if isinstance(dtype, torch.dtype) else frozenset()
