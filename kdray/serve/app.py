"""The ASGI application over any engine: OpenAI's endpoints, health, metrics. Needs no Ray."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from kdray.model.tokenizer import Tokenizer
from kdray.serve import schema
from kdray.serve.engine import EngineClient
from kdray.serve.middleware import AnswerErrors, answer_http_error
from kdray.serve.surface import ServeLimits, Surface, package_version

__all__ = ["ServeLimits", "build_app"]


def build_app(
    engine: EngineClient, tokenizer: Tokenizer, name: str, limits: ServeLimits | None = None
) -> FastAPI:
    """The application that serves `engine` as the model `name`."""
    surface = Surface(engine=engine, tokenizer=tokenizer, name=name, limits=limits or ServeLimits())
    app = FastAPI(title="kdray", version=package_version("kdray"), redirect_slashes=False)
    app.add_middleware(AnswerErrors)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_http_error)
    _add_generation(app, surface)
    _add_facts(app, surface)
    return app


def _add_generation(app: FastAPI, surface: Surface) -> None:
    errors = schema.GENERATION_ERRORS
    for path, endpoint, body in (
        ("/v1/chat/completions", surface.chat, schema.CHAT_BODY),
        ("/v1/completions", surface.completion, schema.COMPLETION_BODY),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], responses=errors, openapi_extra=body)


def _add_facts(app: FastAPI, surface: Surface) -> None:
    app.add_api_route("/v1/models", surface.models)
    app.add_api_route("/v1/models/{model:path}", surface.model, responses=schema.MODEL_ERRORS)
    app.add_api_route("/health", surface.health, responses=schema.HEALTH_ERRORS)
    app.add_api_route("/metrics", surface.metrics_page, response_class=PlainTextResponse)
    app.add_api_route("/version", surface.version)
