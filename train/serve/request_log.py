"""Logging each request in a line on stderr, and counting it."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wgrad.train.files.input_files import one_line
from wgrad.train.serve.metrics import Metrics
from wgrad.train.terminal.output import say

NOTE = "wgrad.note"  # key of a request's scope, for a note of the application


class RequestLog:
    """The outermost ASGI middleware. quiet: only count."""

    def __init__(self, app: ASGIApp, metrics: Metrics, quiet: bool) -> None:
        self.app, self._metrics, self._quiet = app, metrics, quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            seconds = time.monotonic() - begin
            self._metrics.answered(status, seconds)
            if not self._quiet:
                client = (scope.get("client") or ("-",))[0]
                asked = one_line(f"{scope.get('method', '')} {scope.get('path', '')}"[:200])
                note = one_line(str(scope.get(NOTE, "")))
                clock = time.strftime("%H:%M:%S")
                say(f"{clock} {client} {asked} {status} {seconds:.2f} s{note and ' '}{note}", "stderr")
