"""What `serve run` and `serve deploy` import.

serve run kdray.serve.applications:demo
serve run kdray.serve.applications:build model=/models/kimi tp=8 engines=1
serve deploy cluster/serve.yaml          # import_path: kdray.serve.applications:build
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from kdray.serve.arguments import parse_arguments
from kdray.serve.deployment import hosting_application


def build(args: dict[str, Any]) -> Application:
    """An application from a Serve config's `args`; their names: kdray.serve.arguments.Arguments."""
    return hosting_application(parse_arguments(args))


demo = hosting_application(parse_arguments({"device": "cpu"}))
