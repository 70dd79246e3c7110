"""The ASGI application over any engine: OpenAI's endpoints, health, metrics. Needs no Ray."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from kdray.model.tokenizer import Tokenizer
from kdray.serve import schema
from kdray.serve.admission import ServeLimits
from kdray.serve.control import Control, add_control_routes
from kdray.serve.engine import EngineClient
from kdray.serve.keys import KeyRing
from kdray.serve.middleware import AnswerErrors, CheckKeys, answer_http_error
from kdray.serve.surface import Surface, package_version

__all__ = ["ServeLimits", "build_app"]


def build_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    name: str,
    limits: ServeLimits | None = None,
    keys: KeyRing | None = None,
) -> FastAPI:
    """The application that serves `engine` as the model `name`.

    keys   who is let in; None: everybody may generate, nobody may control
    Its state has the `surface`, for who wants its metrics as data.
    """
    keys = keys or KeyRing()
    surface = Surface(engine=engine, tokenizer=tokenizer, name=name, limits=limits or ServeLimits())
    app = FastAPI(title="kdray", version=package_version("kdray"), redirect_slashes=False)
    app.state.surface = surface
    app.add_middleware(CheckKeys, keys=keys)
    app.add_middleware(AnswerErrors, watcher=surface.counts)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_http_error)
    _add_generation(app, surface)
    _add_facts(app, surface)
    add_control_routes(app, Control(engine=engine, keys=keys))
    return app


def _add_generation(app: FastAPI, surface: Surface) -> None:
    errors = schema.GENERATION_ERRORS
    for path, endpoint, body in (
        ("/v1/chat/completions", surface.chat, schema.CHAT_BODY),
        ("/v1/completions", surface.completion, schema.COMPLETION_BODY),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], responses=errors, openapi_extra=body)


def _add_facts(app: FastAPI, surface: Surface) -> None:
    errors = schema.FACT_ERRORS
    app.add_api_route("/v1/models", surface.models, responses=errors)
    app.add_api_route("/v1/models/{model:path}", surface.model, responses=schema.MODEL_ERRORS)
    app.add_api_route("/health", surface.health, responses=schema.HEALTH_ERRORS)
    app.add_api_route(
        "/metrics", surface.metrics_page, response_class=PlainTextResponse, responses=errors
    )
    app.add_api_route("/version", surface.version, responses=errors)
