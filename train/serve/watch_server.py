"""The page of `wgrad watch` on 127.0.0.1: two addresses, which are compared and no more, so that nothing of a request
reaches the file system."""

from __future__ import annotations

import base64
import hashlib
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
from wgrad.train.serve.sites import is_loopback, refusal

HOST = "127.0.0.1"
_PIECES = 8  # of a file that are read for one answer
_NUMBERS = r"\d{1,9}\.\d{1,9}\.\d{1,9}\.\d{1,9}"
_HAVE = re.compile(rf"have=({_NUMBERS}(?:,{_NUMBERS})*)", re.ASCII)
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Connection": "close",
}
_TEXT = "text/plain; charset=utf-8"


def content_policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own script and style, by their hashes, and its own server."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


class Watch:
    """State shared by all requests: the page and the runs. answer: one request at a time reads files."""

    def __init__(self, page: str, runs: Sequence[WatchedRun]) -> None:
        self.page, self.policy, self.runs = page.encode(), content_policy(page), runs
        self._lock = threading.Lock()
        self._name = secrets.token_hex(8)  # by which a page knows that it is another one, which counts from the begin

    def answer(self, have: str) -> bytes:
        """JSON: of each run what is new to somebody who has that much; "" for nothing. ValueError: of other runs."""
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
        """The application, in ASGI's terms."""
        response = await self._respond(scope)
        response.headers.update(_HEADERS)
        response.headers["Content-Security-Policy"] = self.policy
        await response(scope, receive, send)

    async def _respond(self, scope: Scope) -> Response:
        """Nothing of a request is looked at before it is known to come from here."""
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
        if path == "/" and not query:
            return Response(self.page, media_type="text/html; charset=utf-8")
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
    """Listens on 127.0.0.1 from the start; answers within the block. port 0: any that is free. WgradError: it is taken,
    or not allowed."""

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
        """From any thread."""
        self._server.stop()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
