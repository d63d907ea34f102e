"""The page of `wgrad watch` on 127.0.0.1, by the standard library: two addresses, which are compared and no more, so
that nothing of a request reaches the file system."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import socketserver
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.run.watched import WatchedRun
from wgrad.train.serve.sites import is_loopback, refusal

HOST = "127.0.0.1"
_PIECES = 8  # of a file that are read for one answer
_SECONDS = 10  # for a request to come, and for its answer to be taken
_NUMBERS = r"\d{1,9}\.\d{1,9}\.\d{1,9}\.\d{1,9}"
_NEWS = re.compile(rf"/news(?:\?have=({_NUMBERS}(?:,{_NUMBERS})*))?", re.ASCII)
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


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
    """What all requests share: the page and the runs. answer: one request at a time reads files."""

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


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = _SECONDS

    def parse_request(self) -> bool:
        """Nothing of a request is looked at before it is known to come from here."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        header, wrong = refusal(
            hosts[0] if len(hosts) == 1 else "",
            self.headers.get_all("Origin", []),
            self.headers.get("Sec-Fetch-Site", "none"),
            is_loopback,
        )
        if header:
            self.send_error(403, f"{header}: {wrong}")
        elif self.command != "GET":
            self.send_error(405, "only GET is answered")
        return not header and self.command == "GET"

    def do_GET(self) -> None:
        watch = self.server.watch
        if self.path == "/":
            self._send(200, "text/html; charset=utf-8", watch.page)
        elif found := _NEWS.fullmatch(self.path):
            try:
                self._send(200, "application/json", watch.answer(found[1] or ""))
            except ValueError:
                self.send_error(400, "have: must have four numbers of each run: load the page anew")
        else:
            self.send_error(404, "there is / and /news")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{message or code}\n".encode("utf-8", "backslashreplace"))

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.close_connection = True
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", self.server.watch.policy)
        if code == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "wgrad"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said of requests."""


class WatchServer(ThreadingHTTPServer):
    """Listens on 127.0.0.1 from the start. port 0: any that is free. WgradError: it is taken, or not allowed."""

    daemon_threads, block_on_close = True, False
    # On Windows this would let a second server take the same port; elsewhere it is needed to start anew at once.
    allow_reuse_address = os.name != "nt"

    def __init__(self, port: int, watch: Watch) -> None:
        self.watch = watch
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise WgradError(
                f"--port: cannot listen on {HOST}, port {port}: {reason}: end what listens there, or give another "
                "--port (0: any that is free)"
            ) from error

    def server_bind(self) -> None:
        """HTTPServer's own asks a name server for this machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who has gone before the answer is no error of ours."""

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}"
