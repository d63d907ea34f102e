"""The web application: OpenAI's paths, on starlette. What a request asks for is done by the engine, on a thread of
its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.json import encode  # in a tenth of the time of json.dumps
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from wgrad.train.files.input_files import one_line
from wgrad.train.serve.answer_parts import Style
from wgrad.train.serve.answers import ChatForm, Choice, CompletionForm, Form, Octets, TokenText, usage
from wgrad.train.serve.body import read_body
from wgrad.train.serve.embeddings import EmbeddingRequest
from wgrad.train.serve.engine import Engine
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.exchange import Events, Outbox, Pieces, pieces
from wgrad.train.serve.jobs import Job
from wgrad.train.serve.limits import Full
from wgrad.train.serve.metrics import CONTENT_TYPE
from wgrad.train.serve.pages import page_routes
from wgrad.train.serve.preparation import Preparation
from wgrad.train.serve.request_log import NOTE
from wgrad.train.serve.requests import Body, ChatRequest, CompletionRequest, parse_request
from wgrad.train.serve.requests import Request as Asked
from wgrad.train.serve.responses_form import ResponsesForm
from wgrad.train.serve.responses_request import NAMES, ResponsesRequest

_RETRY_SECONDS = "1"
_PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/health",
    "/metrics",
)


def make_app(engine: Engine, preparation: Preparation) -> Starlette:
    """Paths of OpenAI's API, /health, /metrics and a page to chat; errors of all others in the same form."""
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
        *chat_page(),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _http_error, 500: _fault})


def chat_page() -> list[Route]:
    """Return the routes of a page to chat with the models."""
    return page_routes("chat.html", "page.css", "page.js", "chat.js", "serve.js")


async def _api_error(request: Request, error: Any) -> Response:
    again = {"Retry-After": _RETRY_SECONDS} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, again)


async def _http_error(request: Request, error: Any) -> Response:
    paths = f"this server has {', '.join(_PATHS)}"
    message = f"{request.method[:20]} {one_line(request.url.path)}: {error.detail}: {paths}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, error.headers)


async def _fault(request: Request, error: Any) -> Response:
    return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)


class Api:
    """The answers to each path."""

    def __init__(self, engine: Engine, preparation: Preparation) -> None:
        self.engine, self.preparation = engine, preparation
        self._begun, self._outbox = int(time.time()), Outbox()
        engine.together = self._outbox.together

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
        events = Events(self._outbox)
        jobs, texts = await run_in_threadpool(self.preparation.completion_jobs, asked, events.put)
        choices = [
            Choice(number, 0 if number % asked.n else len(job.prompt), text)  # a prompt counts once
            for number, (job, text) in enumerate(zip(jobs, texts))
        ]
        form = CompletionForm(asked.model, asked.top is not None, self._token_text(asked), asked.tells_usage)
        return await self._answer(request, asked, jobs, choices, form, events)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), ChatRequest)
        events = Events(self._outbox)
        jobs, style = await run_in_threadpool(self.preparation.chat_jobs, asked, events.put)
        form = ChatForm(
            asked.model, asked.top is not None, self._token_text(asked), asked.tells_usage, self._octets(asked)
        )
        return await self._answer(request, asked, jobs, _choices(jobs, style), form, events)

    async def responses(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), ResponsesRequest)
        events = Events(self._outbox)
        try:
            jobs, style = await run_in_threadpool(self.preparation.chat_jobs, asked.as_chat(), events.put)
        except ApiError as error:
            raise error.renamed(NAMES) from error
        form = ResponsesForm(asked, self._token_text(asked), self._octets(asked))
        return await self._answer(request, asked, jobs, _choices(jobs, style), form, events)

    async def embeddings(self, request: Request) -> Response:
        asked = parse_request(await read_body(request), EmbeddingRequest)
        events = Events(self._outbox)
        jobs = await run_in_threadpool(self.preparation.embedding_jobs, asked, events.put)
        choices = [Choice(number, len(job.prompt)) for number, job in enumerate(jobs)]
        async for _ in self._pieces(request, asked, jobs, choices, events):
            pass
        return JSONResponse(await run_in_threadpool(asked.answer, choices))

    def _token_text(self, asked: Asked) -> TokenText:
        return self.preparation.tokenizers[asked.model].token_text

    def _octets(self, asked: Asked) -> Octets:
        return self.preparation.tokenizers[asked.model].partial_octets

    def _pieces(
        self, request: Request, asked: Body, jobs: Sequence[Job], choices: Sequence[Choice], events: Events
    ) -> Pieces:
        """Have the engine answer. ApiError."""
        try:
            self.engine.submit(jobs)
        except Full:
            raise ApiError(429, "as many requests wait as may (--max-waiting): ask again later") from None
        request.scope[NOTE] = _Note(asked.model, choices)
        return pieces(request, jobs, choices, events)

    async def _answer(
        self,
        request: Request,
        asked: Asked,
        jobs: Sequence[Job],
        choices: Sequence[Choice],
        form: Form,
        events: Events,
    ) -> Response:
        found = self._pieces(request, asked, jobs, choices, events)
        if asked.stream:
            begun = form.opening(choices)
            begun += form.events(*await anext(found))  # what fails before anything is sent has a status of its own
            stream = _stream(form, choices, begun, found)
            return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async for _ in found:
            pass
        return JSONResponse(form.answer(choices))


def _choices(jobs: Sequence[Job], style: Style) -> list[Choice]:
    return [Choice(number, 0 if number else len(job.prompt), style=style) for number, job in enumerate(jobs)]


class _Note:
    """Words on a request for the log, as it ends."""

    def __init__(self, model: str, choices: Sequence[Choice]) -> None:
        self.model, self.choices = model, choices

    def __str__(self) -> str:
        told = usage(self.choices)
        return f"{self.model} {told['prompt_tokens']} + {told['completion_tokens']} tokens"


async def _stream(
    form: Form, choices: Sequence[Choice], begun: Sequence[dict[str, Any]], found: Pieces
) -> AsyncIterator[bytes]:
    """Server-sent events. begun: those that there are already."""
    async with aclosing(found):
        yield _events(begun)
        try:
            async for choice, piece in found:
                yield _events(form.events(choice, piece))
                await asyncio.sleep(0)  # a client that has gone is seen before more is written to it
        except ApiError as error:
            yield _events(form.failure(error))
            return
    yield _events(form.closing(choices)) + form.end.encode()


def _events(values: Sequence[dict[str, Any]]) -> bytes:
    """Values as they are sent; one with a type is named by it."""
    parts = list[bytes]()
    for value in values:
        if "type" in value:
            parts.append(b"event: %b\n" % value["type"].encode())
        parts.append(b"data: %b\n\n" % encode(value))
    return b"".join(parts)
