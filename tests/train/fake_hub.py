"""A Hugging Face Hub on localhost that answers questions about revisions, and serves files and parts of files."""

from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote

_API = re.compile(r"/api/(?:datasets|models)/(\w+/\w+)(?:/(revision|tree)/([^?]+))?(?:\?.*)?")
_FILE = re.compile(r"(?:/datasets)?/(\w+/\w+)/resolve/([^/]+)/([^?]+)(?:\?.*)?")
Files = dict[str, bytes]


class LocalHub:
    """A server on localhost until `close`. handler: class that answers requests, which gets the server as `hub`.

    While `silence` is an event, requests that match `silent` get no answer until the event is set or five seconds have
    passed, and then a closed connection.
    """

    def __init__(self, handler: type[LocalHandler]) -> None:
        self.silence: Event | None = None
        self.silent = "^(GET|HEAD) "  # pattern of method and path
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.silence:
            self.silence.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class LocalHandler(BaseHTTPRequestHandler):
    hub: Any

    def is_silent(self) -> bool:
        """Return whether this request gets no answer; if so, wait first."""
        if self.hub.silence is None or not re.search(self.hub.silent, f"{self.command} {self.path}"):
            return False
        self.hub.silence.wait(5)
        return True

    def log_message(self, *args: Any) -> None:
        pass


class FakeHub(LocalHub):
    """A hub with one data set or model.

    Args:
        hub_id: Its id.
        revisions: Contents of its files, by revision.
        token: Token that requests must have; without it, answers are those for a private repository.

    Attributes:
        failure: Status, X-Error-Code and X-Error-Message of every answer; None: requests succeed.
        asked: Paths of all requests.
        sent: Bytes of all answers.
    """

    def __init__(self, hub_id: str, revisions: dict[str, Files], token: str = "") -> None:
        self.hub_id, self.revisions, self.token = hub_id, revisions, token
        self.failure: tuple[int, str, str] | None = None
        self.asked: list[str] = []
        self.sent = 0
        super().__init__(_Handler)

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def find(self, revision: str) -> str | None:
        """Return the name of a revision, given its name or its commit."""
        return next((name for name in self.revisions if revision in (name, self.commit(name))), None)


class _Handler(LocalHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        hub.asked.append(self.path)
        if self.is_silent():
            return None
        if hub.failure:
            return self._refuse(*hub.failure)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._refuse(401, "RepoNotFound", "Repository not found")
        api, file = _API.fullmatch(self.path), _FILE.fullmatch(self.path)
        found = api or file
        if found is None or found[1] != hub.hub_id:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        revision = hub.find(unquote((api[3] if api else file[2] if file else "") or "main"))
        if revision is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        files, commit = hub.revisions[revision], hub.commit(revision)
        if api and api[2] == "tree":
            entries = [{"type": "file", "path": n, "oid": "0" * 40, "size": len(v)} for n, v in files.items()]
            return self._answer(json.dumps(entries).encode(), commit)
        if api:
            siblings = [{"rfilename": name} for name in files]
            value = {"id": hub.hub_id, "sha": commit, "siblings": siblings, "private": bool(hub.token)}
            return self._answer(json.dumps(value).encode(), commit)
        assert file is not None
        name = unquote(file[3])
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        self._answer(files[name], commit)

    def _answer(self, body: bytes, commit: str) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.send_response(206 if part else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self._end(body[int(part[1]) : int(part[2]) + 1] if part else body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self._end(b"")

    def _end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.hub.sent += len(body)
            self.wfile.write(body)
