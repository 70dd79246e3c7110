"""A model folder's own chat template: Jinja, in a sandbox, with the names transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kdray.errors import CheckpointError, InvalidRequest


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """Render a chat template.

    Raises CheckpointError where the template itself is broken and InvalidRequest (param
    "messages") where it refuses the messages or trips over them.
    """
    try:
        return _compile(source).render(variables)
    except SecurityError as cause:
        raise CheckpointError(f"the chat template does what it must not: {cause}") from cause
    except TemplateError as cause:
        message = f"the model's chat template refuses the messages: {cause}"
        raise InvalidRequest(message, param="messages") from cause
    except (TypeError, ValueError, KeyError, AttributeError) as cause:
        message = f"the model's chat template cannot render the messages: {cause}"
        raise InvalidRequest(message, param="messages") from cause


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as cause:
        raise CheckpointError(
            f"the chat template has a syntax error in line {cause.lineno}: {cause.message}"
        ) from cause


def _to_json(value: Any, **options: Any) -> str:
    """JSON as models were trained on it: no HTML escapes, no \\u escapes unless asked for."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
