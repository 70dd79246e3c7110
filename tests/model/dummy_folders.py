"""A target's and its drafter's config.json, and nothing else, that eight ranks can split."""

from __future__ import annotations

from pathlib import Path

from tests.model import random_kimi

FIELDS = random_kimi.FIELDS | {
    "vocab_size": 1024, "intermediate_size": 256, "moe_intermediate_size": 256,
    "num_attention_heads": 8,
}  # fmt: skip


def write(root: Path, **changes: int) -> tuple[Path, Path]:
    """changes: of the target's fields."""
    fields = ",".join(f"{name}={value}" for name, value in (FIELDS | changes).items())
    drafter = root / "drafter"
    options = ["--set", fields, "--drafter", str(drafter), "--draft-layers", "2", "--config-only"]
    return random_kimi.write(root / "target", *options), drafter
