"""The studio in this process on a free port, and a client that uses the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgrad.train.commands.studio import guarded_studio
from wgrad.train.options.studio_config import StudioConfig
from wgrad.train.serve.http_server import HttpServer, open_address
from wgrad.train.serve.run_list import RunList
from wgrad.train.serve.studio import Studio

BASE = str(Path(__file__).parents[2] / "examples" / "base_model")
# A run of a second on NumPy.
SHORT = {
    "model": BASE, "device": "cpu", "max_length": "64", "batch_size": "2", "gradient_accumulation_steps": "1",
    "lora_r": "2", "eval_tokens": "64", "max_steps": "2", "sample": False, "chat_template": "chatml",
}  # fmt: skip
SECONDS = 120.0


@dataclass
class Client:
    port: int
    studio: Studio

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Send a request and return status, JSON or text, and headers. `_` stands for `-` in names of headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        sent = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, sent, {"Content-Type": "application/json", **named})
            answer = connection.getresponse()
            text, told = answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()}
        finally:
            connection.close()
        return answer.status, json.loads(text) if told["content-type"] == "application/json" else text, told

    def do(self, name: str, **body: Any) -> Any:
        """The answer to a question that is answered."""
        status, found, _ = self.ask("POST", f"/api/{name}", body)
        assert status == 200, found
        return found

    def refused(self, name: str, **body: Any) -> str:
        """The message of a question that is refused: one line."""
        status, found, _ = self.ask("POST", f"/api/{name}", body)
        assert status == 400 and "\n" not in found["error"]["message"], found
        return str(found["error"]["message"])

    def run_state(self, run: str) -> dict[str, Any]:
        return next(one for one in self.do("state")["runs"] if one["run"] == run)

    def wait(self, run: str, *states: str) -> dict[str, Any]:
        """Until a run has one of these states."""
        end = time.monotonic() + SECONDS
        while (found := self.run_state(run))["state"] not in states:
            assert time.monotonic() < end, found
            time.sleep(0.05)
        return found


@contextmanager
def studio_in(folder: Path, **options: Any) -> Iterator[Client]:
    """Runs are in `folder`. What goes on at the end is ended."""
    config = StudioConfig(port=0, **options)
    listening = open_address(config.host, config.port, config.key)
    studio = Studio(RunList(str(folder)))
    server = HttpServer(guarded_studio(studio, config), listening, lambda: None)
    server.start()
    try:
        yield Client(listening.getsockname()[1], studio)
    finally:
        studio.close()
        server.stop()
        for child in studio.runs._children.values():
            if child.poll() is None:
                child.kill()
            child.wait()
