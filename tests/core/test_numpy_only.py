"""import kdray.core needs nothing but NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ImportError(name)

allowed = {*sys.stdlib_module_names, "numpy", "kdray"}
import numpy
sys.meta_path.insert(0, Block())
from kdray.core import budget, pages, plan, request, sampling, tree
print(tree.build_tree(7, [[2, 3]], [[-5, -9]], 2).token.tolist())
"""


def test_core_runs_with_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[7, 2, 3]"
