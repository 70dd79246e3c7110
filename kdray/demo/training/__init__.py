"""Training of the demo model: target, drafter, their gates and their files, from a seed."""

from __future__ import annotations
