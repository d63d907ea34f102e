"""The web application: paths of OpenAI's and Ollama's APIs, on starlette. The engine works on its own thread."""

from __future__ import annotations

import time
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wgrad.train.files.input_files import one_line
from wgrad.train.serve.answering import Answering, choices_of
from wgrad.train.serve.answers import ChatForm, Choice, CompletionForm
from wgrad.train.serve.body import read_body
from wgrad.train.serve.embeddings import EmbeddingRequest
from wgrad.train.serve.engine import Engine
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.metrics import CONTENT_TYPE
from wgrad.train.serve.ollama import ollama_routes
from wgrad.train.serve.pages import page_routes
from wgrad.train.serve.preparation import Preparation
from wgrad.train.serve.requests import ChatRequest, CompletionRequest, parse_request
from wgrad.train.serve.responses_form import ResponsesForm
from wgrad.train.serve.responses_request import NAMES, ResponsesRequest

_RETRY_SECONDS = "1"
_PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/tags",
    "/api/show",
    "/health",
    "/metrics",
)


def make_app(engine: Engine, preparation: Preparation) -> Starlette:
    """Return the application: OpenAI's and Ollama's APIs, /health, /metrics and a chat page, with errors in the form of
    the API."""
    api = Api(engine, preparation)
    routes = [
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        *ollama_routes(api),
        *chat_page(),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _http_error, 500: _fault})


def chat_page() -> list[Route]:
    """Return the routes of a page to chat with the models."""
    return page_routes("chat.html", "page.css", "page.js", "chat.js", "serve.js")


async def _api_error(request: Request, error: Any) -> Response:
    again = {"Retry-After": _RETRY_SECONDS} if error.status in (429, 503) else None
    return JSONResponse(error.body(request.url.path), error.status, again)


async def _http_error(request: Request, error: Any) -> Response:
    paths = f"this server has {', '.join(_PATHS)}"
    message = f"{request.method[:20]} {one_line(request.url.path)}: {error.detail}: {paths}"
    body = ApiError(error.status_code, message).body(request.url.path)
    return JSONResponse(body, error.status_code, error.headers)


async def _fault(request: Request, error: Any) -> Response:
    return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(request.url.path), 500)


class Api(Answering):
    """The handlers of OpenAI's API."""

    def __init__(self, engine: Engine, preparation: Preparation) -> None:
        super().__init__(engine, preparation)
        self._begun = int(time.time())

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._begun, "owned_by": "wgrad"}

    async def health(self, request: Request) -> Response:
        status = self.engine.health
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.engine.metrics.text(self.engine.state()), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.engine.tokenizers]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.engine.tokenizers:
            raise ApiError(404, f"model {name[:200]!r} is not served: /v1/models lists what is", code="model_not_found")
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), CompletionRequest)
        events = self.events()
        jobs, texts = await run_in_threadpool(self.preparation.completion_jobs, asked, events.put)
        choices = [
            Choice(number, 0 if number % asked.n else len(job.prompt), text)  # a prompt counts once
            for number, (job, text) in enumerate(zip(jobs, texts))
        ]
        form = CompletionForm(asked.model, asked.top is not None, self.token_text(asked), asked.tells_usage)
        return await self.answer(request, asked, jobs, choices, form, events)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), ChatRequest)
        events = self.events()
        jobs, style = await run_in_threadpool(self.preparation.chat_jobs, asked, events.put)
        form = ChatForm(
            asked.model, asked.top is not None, self.token_text(asked), asked.tells_usage, self.octets(asked)
        )
        return await self.answer(request, asked, jobs, choices_of(jobs, style), form, events)

    async def responses(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), ResponsesRequest)
        events = self.events()
        try:
            jobs, style = await run_in_threadpool(self.preparation.chat_jobs, asked.as_chat(), events.put)
        except ApiError as error:
            raise error.renamed(NAMES) from error
        form = ResponsesForm(asked, self.token_text(asked), self.octets(asked))
        return await self.answer(request, asked, jobs, choices_of(jobs, style), form, events)

    async def embeddings(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), EmbeddingRequest)
        events = self.events()
        jobs = await run_in_threadpool(self.preparation.embedding_jobs, asked, events.put)
        choices = [Choice(number, len(job.prompt)) for number, job in enumerate(jobs)]
        async for _ in self.pieces(request, asked, jobs, choices, events):
            pass
        return JSONResponse(await run_in_threadpool(asked.answer, choices))
