"""From jobs to responses: the engine runs them, and a form writes the answers, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.json import encode  # in a tenth of the time of json.dumps
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from wgrad.train.serve.answer_parts import Style
from wgrad.train.serve.answers import EVENTS, Choice, Form, Octets, TokenText, usage
from wgrad.train.serve.engine import Engine
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.exchange import Events, Outbox, Pieces, pieces
from wgrad.train.serve.jobs import Job
from wgrad.train.serve.limits import Full
from wgrad.train.serve.preparation import Preparation
from wgrad.train.serve.request_log import NOTE
from wgrad.train.serve.requests import Body
from wgrad.train.serve.requests import Request as Asked


class Answering:
    """The part that all APIs of a server share."""

    def __init__(self, engine: Engine, preparation: Preparation) -> None:
        self.engine, self.preparation = engine, preparation
        self._outbox = Outbox()
        engine.together = self._outbox.together

    def events(self) -> Events:
        """Return the queue of a request's events."""
        return Events(self._outbox)

    def token_text(self, asked: Asked) -> TokenText:
        return self.preparation.tokenizers[asked.model].token_text

    def octets(self, asked: Asked) -> Octets:
        return self.preparation.tokenizers[asked.model].partial_octets

    def pieces(
        self, request: Request, asked: Body, jobs: Sequence[Job], choices: Sequence[Choice], events: Events
    ) -> Pieces:
        """Submit jobs to the engine, and return the pieces of their answers. Raises ApiError."""
        try:
            self.engine.submit(jobs)
        except Full:
            raise ApiError(429, "as many requests wait as may (--max-waiting): ask again later") from None
        request.scope[NOTE] = _Note(asked.model, choices)
        return pieces(request, jobs, choices, events)

    async def answer(
        self,
        request: Request,
        asked: Asked,
        jobs: Sequence[Job],
        choices: Sequence[Choice],
        form: Form,
        events: Events,
    ) -> Response:
        found = self.pieces(request, asked, jobs, choices, events)
        if asked.stream:
            begun = form.opening(choices)
            begun += form.events(*await anext(found))  # a failure before anything is sent has its own status
            stream = _stream(form, choices, begun, found)
            return StreamingResponse(stream, media_type=form.media_type, headers={"Cache-Control": "no-cache"})
        async for _ in found:
            pass
        return JSONResponse(form.answer(choices))


def choices_of(jobs: Sequence[Job], style: Style) -> list[Choice]:
    return [Choice(number, 0 if number else len(job.prompt), style=style) for number, job in enumerate(jobs)]


class _Note:
    """Model and tokens of a request, for the log, as they are at its end."""

    def __init__(self, model: str, choices: Sequence[Choice]) -> None:
        self.model, self.choices = model, choices

    def __str__(self) -> str:
        told = usage(self.choices)
        return f"{self.model} {told['prompt_tokens']} + {told['completion_tokens']} tokens"


async def _stream(
    form: Form, choices: Sequence[Choice], begun: Sequence[dict[str, Any]], found: Pieces
) -> AsyncIterator[bytes]:
    """Yield server-sent events, or lines of JSON. begun: the first of them."""
    written = _events if form.media_type == EVENTS else _lines
    async with aclosing(found):
        yield written(begun)
        try:
            async for choice, piece in found:
                yield written(form.events(choice, piece))
                await asyncio.sleep(0)  # notice a client that has gone before writing more
        except ApiError as error:
            yield written(form.failure(error))
            return
    yield written(form.closing(choices)) + form.end.encode()


def _lines(values: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(encode(value) + b"\n" for value in values)


def _events(values: Sequence[dict[str, Any]]) -> bytes:
    """Encode values as server-sent events; a value with a type is named by it."""
    parts = list[bytes]()
    for value in values:
        if "type" in value:
            parts.append(b"event: %b\n" % value["type"].encode())
        parts.append(b"data: %b\n\n" % encode(value))
    return b"".join(parts)
