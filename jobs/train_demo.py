"""Train the embedded demo model from a seed: python jobs/train_demo.py --out DIR --seed 1

About seven minutes on one H200. ``--smoke`` runs every part in seconds on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kdray.demo.training.run import Plan, measure, run, smoke_plan
from kdray.demo.training.steps import Budget


def main() -> None:
    """Parse the wishes, make a plan, run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="tiny run on the CPU")
    parser.add_argument("--measure", type=Path, metavar="FILES", help="only measure these files")
    parser.add_argument("--target-seconds", type=float, default=220.0)
    parser.add_argument("--target-steps", type=int, help="instead of seconds, to repeat a run")
    parser.add_argument("--drafter-seconds", type=float, nargs="+", default=[8.0, 15.0, 30.0])
    parser.add_argument("--drafter-steps", type=int, nargs="+", help="instead of seconds")
    parser.add_argument("--documents", type=int, default=1_600_000)
    parser.add_argument("--processes", type=int, default=15)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        torch.set_num_threads(1)
        run(smoke_plan(options.out, options.seed))
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device; use --smoke to try every part on the CPU")
    plan = Plan(
        options.out,
        options.seed,
        torch.device("cuda"),
        target=Budget(options.target_seconds, options.target_steps),
        drafters=_drafter_budgets(options),
        documents=options.documents,
        processes=options.processes,
    )
    if options.measure:
        measure(plan, options.measure)
    else:
        run(plan)


def _drafter_budgets(options: argparse.Namespace) -> tuple[Budget, ...]:
    if options.drafter_steps:
        return tuple(Budget(0.0, steps) for steps in options.drafter_steps)
    return tuple(Budget(seconds) for seconds in options.drafter_seconds)


if __name__ == "__main__":
    main()
