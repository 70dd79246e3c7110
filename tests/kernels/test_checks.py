"""What a kernel's door lets in, and what it says to the rest."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kdray.kernels.checks import check


@dataclass(frozen=True)
class Batch:
    mask: Tensor
    count: Tensor | None = None


@check(query="T H 8 float", key="T 8", batch={"mask": "T W int32", "count": "? T"})
def attend(query: Tensor, key: Tensor, batch: Batch, scale: float = 1.0) -> float:
    return scale


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_fitting_arguments_pass_by_place_and_by_name() -> None:
    query, key, batch = torch.zeros(3, 2, 8), ints(3, 8), Batch(ints(3, 5))
    assert attend(query, key, batch, 2.0) == 2.0
    assert attend(batch=batch, key=key, query=query.bfloat16()) == 1.0
    assert attend(query, key, Batch(ints(3, 5), ints(3))) == 1.0


@pytest.mark.parametrize(
    ("query", "key", "batch", "message"),
    [
        (torch.zeros(3, 16), ints(3, 8), Batch(ints(3, 1)), r"query must be \[T, H, 8\]"),
        (torch.zeros(3, 2, 7), ints(3, 8), Batch(ints(3, 1)), r"query must be .* got \[3, 2, 7\]"),
        (torch.zeros(3, 2, 8), ints(4, 8), Batch(ints(3, 1)), r"key must be \[T=3, 8\]"),
        (torch.zeros(3, 2, 8), ints(3, 8), Batch(ints(4, 1)), r"batch\.mask must be \[T=3, W\]"),
        (ints(3, 2, 8), ints(3, 8), Batch(ints(3, 1)), r"float32.*got torch\.int32"),
        (torch.zeros(3, 2, 8), ints(3, 8), Batch(torch.zeros(3, 1)), r"must be torch\.int32"),
        (torch.zeros(3, 2, 8), ints(8, 3).T, Batch(ints(3, 1)), r"pass key\.contiguous\(\)"),
        (
            torch.zeros(3, 2, 8),
            ints(3, 8).to("meta"),
            Batch(ints(3, 1)),
            "key is on meta, the arguments before it on cpu",
        ),
    ],
)
def test_a_misfit_is_named(query: Tensor, key: Tensor, batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=f"attend: .*{message}|attend: {message}"):
        attend(query, key, batch)


def test_only_optional_tensors_may_be_absent() -> None:
    with pytest.raises(TypeError, match="key must be a tensor, got NoneType"):
        attend(torch.zeros(3, 2, 8), None, Batch(ints(3, 1)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key must be a tensor"):
        attend(torch.zeros(3, 2, 8))  # type: ignore[call-arg]


def test_a_spec_must_name_a_parameter() -> None:
    with pytest.raises(TypeError, match="no parameter 'kye'"):
        check(kye="T")(lambda key: key)
