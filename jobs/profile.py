#!/usr/bin/env python3
"""A profile of every rank of an engine while it runs, as one file for Perfetto.

    python jobs/profile.py --tp 2 --steps 20 --out profiles         # an engine of its own, on Ray
    python jobs/profile.py --url http://127.0.0.1:8000 --out profiles  # one that serves already
    ray job submit --working-dir . -- python jobs/profile.py --tp 8 --out /data/profiles

Sends some requests, records steps of all ranks from the same step on, and fetches the files:
merged.json.gz (open it at ui.perfetto.dev), summary.txt (each rank's kernels), and each rank's own
trace and memory. A server that is not alone on its machine wants an admin key (KDRAY_ADMIN_KEYS).
With --nsight the ranks run under Nsight Systems, which writes a report a rank into Ray's session
folder (logs/nsight on the ranks' host).
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path


def hand_over_to_the_library() -> None:
    """This folder is first on a job's path, so cProfile's `import profile` finds this file: the
    module it wants takes its place."""
    path = Path(sysconfig.get_path("stdlib")) / "profile.py"
    spec = importlib.util.spec_from_file_location("profile", path)
    assert spec is not None and spec.loader is not None, "Python comes with profile.py"
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile"] = module
    spec.loader.exec_module(module)


if __name__ == "profile":
    hand_over_to_the_library()
elif __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from profile_run import main

    sys.exit(main(str(__doc__)))
