"""The embedded demo model: its files, the text it was trained on, and its training.

``target/`` and ``drafter/`` hold checkpoints in the public formats (DeepSeek-V3, DFlash).
``text/`` is the seeded grammar with its checkers, ``training/`` makes the files again from a seed.
Importing this package imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def target_path() -> Path:
    """Folder of the demo target: config.json, model.safetensors, tokenizer files."""
    return _HERE / "target"


def drafter_path() -> Path:
    """Folder of the demo drafter: config.json, model.safetensors."""
    return _HERE / "drafter"
