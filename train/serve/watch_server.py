"""The page of `wgrad watch` on 127.0.0.1. Paths are only compared with known ones, so that no part of a request reaches
the file system."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wgrad.train.output.watched import WatchedRun
from wgrad.train.serve.http_server import HttpServer, listen, resolve
from wgrad.train.serve.pages import HEADERS, page_files
from wgrad.train.serve.sites import is_loopback, refusal

HOST = "127.0.0.1"
_PIECES = 8  # most pieces of a file that are read for one answer
_NUMBERS = r"\d{1,9}\.\d{1,9}\.\d{1,9}\.\d{1,9}"
_HAVE = re.compile(rf"have=({_NUMBERS}(?:,{_NUMBERS})*)", re.ASCII)
_HEADERS = {**HEADERS, "Cache-Control": "no-store", "Connection": "close"}
_TEXT = "text/plain; charset=utf-8"
_FILES = ("page.css", "page.js", "charts.js", "watch.js", "uplot.js")


class Watch:
    """State shared by all requests: the page and the runs. One request at a time reads files."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs, self.files = runs, page_files("watch.html", *_FILES)
        self._lock = threading.Lock()
        self._name = secrets.token_hex(8)  # lets a page notice a restarted server, whose counts begin again

    def answer(self, have: str) -> bytes:
        """Return the news of each run as JSON. have: the counts that the client has; "" for none.

        Raises:
            ValueError: `have` does not fit the runs.
        """
        had = [tuple(map(int, one.split("."))) for one in have.split(",")] if have else [(0, 0, 0, 0)] * len(self.runs)
        with self._lock:
            runs = []
            for run, (a, b, c, d) in zip(self.runs, had, strict=True):
                more = True
                for _ in range(_PIECES):
                    more = more and run.read()
                runs.append({**run.news((a, b, c, d)), "more": more})
        return json.dumps({"server": self._name, "runs": runs}, allow_nan=False, separators=(",", ":")).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        response = await self._respond(scope)
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope) -> Response:
        """Check where a request comes from before looking at anything else, and answer it."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        site = headers.get("sec-fetch-site", "none")
        header, wrong = refusal(hosts[0] if len(hosts) == 1 else "", headers.getlist("origin"), site, is_loopback)
        if header:
            return _said(403, f"{header}: {wrong}")
        if scope["method"] != "GET":
            response = _said(405, "only GET is answered")
            response.headers["Allow"] = "GET"
            return response
        path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        if path in self.files and not query:
            return self.files[path]()
        have = _HAVE.fullmatch(query) if query else None
        if path != "/news" or (query and have is None):
            return _said(404, "there is / and /news")
        try:
            news = await run_in_threadpool(self.answer, have[1] if have else "")
        except ValueError:
            return _said(400, "have: must have four numbers of each run: load the page anew")
        return Response(news, media_type="application/json")


def _said(status: int, message: str) -> Response:
    return Response(f"{message}\n".encode("utf-8", "backslashreplace"), status, media_type=_TEXT)


class WatchServer:
    """A server that listens on 127.0.0.1 at once, and answers within its `with` block. port: 0 for any free one.

    Raises:
        WgradError: the port is taken or not allowed.
    """

    def __init__(self, port: int, watch: Watch) -> None:
        self.watch, self._ended = watch, threading.Event()
        listening = listen(resolve(HOST, port), "give another --port (0: any that is free)")
        self.server_port: int = listening.getsockname()[1]
        self._server = HttpServer(watch, listening, self._ended.set)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def serve_forever(self, poll: float = 1.0) -> None:
        """Wait until the server ends; a signal raises. poll: seconds after which one is seen on Windows."""
        while not self._ended.wait(poll):
            pass

    def shutdown(self) -> None:
        """End the server. May be called from any thread."""
        self._server.stop()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
