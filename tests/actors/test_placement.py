"""What a gang asks of a cluster: bundles, chosen GPUs, and what is refused."""

from __future__ import annotations

import pytest

from kdray.actors.placement import Placement
from kdray.arguments import parse_gpus
from kdray.config import EngineConfig
from kdray.errors import ConfigError

CUDA = EngineConfig(tp=2, device="cuda")
CPU = EngineConfig(tp=2, device="cpu")


def test_a_rank_takes_a_gpu_of_the_kind_that_was_asked_for() -> None:
    assert Placement().bundle(CUDA) == {"CPU": 1, "GPU": 1}
    typed = Placement(accelerator_type="RTX-PRO-6000")
    assert typed.bundle(CUDA)["accelerator_type:RTX-PRO-6000"] == 0.001
    assert typed.bundle(CPU) == {"CPU": 1}


def test_a_chosen_gpu_is_the_only_one_its_rank_sees() -> None:
    chosen = Placement(gpus=(5, 2))
    seen = [chosen.env_vars(CUDA, rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)]
    assert seen == ["5", "2"]
    assert chosen.env_vars(CUDA, 0)["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    for left_to_ray in (Placement().env_vars(CUDA, 0), chosen.env_vars(CPU, 0)):
        assert "CUDA_VISIBLE_DEVICES" not in left_to_ray


@pytest.mark.parametrize("gpus", [(0,), (0, 0), (0, 1, 2), (-1, 0)])
def test_gpus_must_seat_every_rank_once(gpus: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="gpus must name 2 different GPUs"):
        Placement(gpus=gpus).check(CUDA)


def test_gpus_on_a_command_line() -> None:
    assert parse_gpus("0,1, 3") == (0, 1, 3) and parse_gpus(None) is None
    with pytest.raises(ConfigError, match="numbers with commas between"):
        parse_gpus("0-3")
