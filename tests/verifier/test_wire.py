"""The step header: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdray.core.plan import PlannedRequest, StepPlan
from kdray.core.request import SamplingParams
from kdray.verifier.wire import Kind, StepHeader, decode, encode

ids = st.integers(0, 2**31 - 1)


@st.composite
def planned(draw: st.DrawFn) -> PlannedRequest:
    return PlannedRequest(
        request_id=draw(st.text(max_size=5)),
        slot=draw(st.integers(0, 4095)),
        num_cached=draw(ids),
        known=np.array(draw(st.lists(ids, min_size=1, max_size=5)), dtype=np.int32),
        budget=draw(st.integers(0, 1024)),
        pages=np.array(draw(st.lists(ids, max_size=5)), dtype=np.int32),
        samples=draw(st.booleans()),
        sampling=SamplingParams(temperature=0.8),
        seed=7,
        num_prompt=3,
    )


@given(
    st.sampled_from([Kind.STEP, Kind.DRAFT]),
    st.lists(planned(), max_size=4),
    ids,
    st.integers(0, 1025),
    st.integers(0, 16),
)
def test_a_header_survives_the_wire(
    kind: Kind, requests: list[PlannedRequest], step: int, num_nodes: int, commit_width: int
) -> None:
    header = StepHeader(
        kind=kind,
        plan=StepPlan(step=step, requests=tuple(requests)),
        num_nodes=num_nodes,
        num_words=-(-num_nodes // 32),
        commit_width=commit_width,
    )
    back = decode(encode(header))
    assert back.kind is kind and back.plan is not None and back.plan.step == step
    assert (back.num_nodes, back.num_words) == (header.num_nodes, header.num_words)
    assert back.commit_width == commit_width and back.commits == (commit_width > 0)
    assert len(back.plan.requests) == len(requests)
    for sent, got in zip(requests, back.plan.requests, strict=True):
        assert (got.slot, got.num_cached, got.budget) == (sent.slot, sent.num_cached, sent.budget)
        assert got.samples == sent.samples
        assert got.known.tolist() == sent.known.tolist()
        assert got.pages.tolist() == sent.pages.tolist()


def test_stop_survives_the_wire() -> None:
    assert decode(encode(StepHeader(kind=Kind.STOP, plan=None))).kind is Kind.STOP


@pytest.mark.parametrize("message", [b"", b"abcd" * 8, np.zeros(8, "<i4").tobytes()])
def test_another_version_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="same kdray"):
        decode(message)


def test_a_cut_message_is_refused() -> None:
    header = StepHeader(
        kind=Kind.STEP,
        plan=StepPlan(
            step=1,
            requests=(
                PlannedRequest(
                    request_id="a",
                    slot=0,
                    num_cached=0,
                    known=np.arange(3, dtype=np.int32),
                    budget=0,
                    pages=np.arange(2, dtype=np.int32),
                    samples=True,
                    sampling=SamplingParams(),
                    seed=0,
                    num_prompt=3,
                ),
            ),
        ),
        num_nodes=1,
        num_words=1,
    )
    with pytest.raises(ValueError, match="wrong length"):
        decode(encode(header)[:-4])
