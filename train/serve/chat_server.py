"""A model to chat with: `wgrad serve` in a child process, and requests that are forwarded to it."""

from __future__ import annotations

import http.client
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from wgrad.device.errors import WgradError
from wgrad.train.model.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE
from wgrad.train.options.network_options import KEY_VARIABLE
from wgrad.train.serve.body import read_body
from wgrad.train.serve.children import Command
from wgrad.train.serve.errors import ApiError

_SECONDS = 600.0  # for the next part of an answer
_PIECE = 1 << 14


class ChatServer:
    """A server of one model, or a base model and an adapter. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._command: Command | None = None
        self._key, self._name, self._title, self._run = "", "", "", ""

    def open_run(self, path: Path) -> None:
        """Load the result of a run: its adapter and base model, or its whole model.

        Raises:
            WgradError: the run has no result yet.
        """
        values = read_config_file(path / CONFIG_FILE) if os.path.exists(path / CONFIG_FILE) else {}
        options = {name: values.get(name) for name in ("device", "compute") if values.get(name)}
        if os.path.exists(path / ADAPTER_CONFIG):
            words = ["--adapter", f"{path.name}={path}"]
            words += ["--model", str(values["model"])] if values.get("model") else []
            if values.get("chat_template"):
                words += ["--chat-template", str(values["chat_template"])]
        elif os.path.exists(path / "config.json"):
            words = ["--model", str(path)]
        else:
            raise WgradError(f"run: {path} has no result to chat with yet: wait for its end")
        self._open([*words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))], path)

    def open_model(self, model: str, device: str) -> None:
        """Load a model without an adapter."""
        if not model:
            raise WgradError("--model is required: give a folder, a GGUF file or a Hub id")
        self._open([f"--model={model}", f"--device={device}"], Path(model))

    def _open(self, words: list[str], path: Path) -> None:
        with self._lock:  # if two are opened at once, one ends before the other begins
            self._end()
            self._name = secrets.token_hex(8)
            self._key, self._title, self._run = secrets.token_hex(16), path.name or str(path), str(path)
            command = ["serve", "--port", "0", "--no-request-log", "--batch-size", "4", *words]
            self._command = Command(command, {KEY_VARIABLE: self._key})

    def close(self) -> None:
        """Free the device."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        command, self._command = self._command, None
        if command is not None:
            command.end()

    def state(self) -> dict[str, Any]:
        """Return `state` (closed, loading, ready or failed); the `id`, `title` and `run` of the model; the `reason` of
        a failure, and the last `line` of output."""
        command = self._command
        if command is None:
            return {"state": "closed", "id": "", "title": "", "run": "", "reason": "", "line": ""}
        state = "failed" if command.state != "running" else "ready" if command.address else "loading"
        line = command.lines[-1] if command.lines else ""
        reason = command.reason or ("the server ended" if state == "failed" else "")
        names = {"id": self._name, "title": self._title, "run": self._run}
        return {"state": state, **names, "reason": reason, "line": line}

    async def forward(self, request: Request) -> Response:
        """Forward a request, and return its answer as it arrives. Raises ApiError if no model is loaded."""
        body = await read_body(request) if request.method == "POST" else None
        command = self._command
        if command is None or not command.address:
            raise ApiError(503, "no model is loaded to chat with: load one")
        place = urlsplit(command.address)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}

        def ask() -> http.client.HTTPResponse:
            connection.request(request.method, quote(request.scope["path"]), body, headers)
            return connection.getresponse()

        try:
            answer = await run_in_threadpool(ask)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(502, f"the model's process does not answer ({error}): load it again") from error
        kind = answer.headers.get("Content-Type", "application/json")
        stream = StreamingResponse(_parts(connection, answer), answer.status, {"Cache-Control": "no-store"})
        stream.headers["Content-Type"] = kind
        return stream


def _parts(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the body of an answer as it arrives, and close the connection, even if the reader leaves early."""
    try:
        while part := answer.read1(_PIECE):
            yield part
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
