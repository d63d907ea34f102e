"""A server in this process on a free port, and a client that uses the standard library."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.train.conftest import random_weights, tiny_config, write_checkpoint
from wgrad.train.commands.serve import guarded, load
from wgrad.train.inference.open_model import open_model
from wgrad.train.options.serve_config import ServeConfig
from wgrad.train.serve.engine import Engine
from wgrad.train.serve.http_server import HttpServer, listen, resolve

NONE: Mapping[str, str] = {}
BASE = Path(__file__).parents[2] / "examples" / "base_model"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """Its parts are those of OpenAI's API."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream that ended as it should."""
        *events, end, rest = self.body.decode().split("\n\n")
        assert end == "data: [DONE]" and rest == "" and self.headers["content-type"].startswith("text/event-stream")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Client:
    port: int
    engine: Engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = NONE) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, value: Any, headers: Mapping[str, str] = NONE) -> Reply:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.ask("POST", f"/v1/{path}", body, {"Content-Type": "application/json", **headers})

    def complete(self, prompt: Any, **options: Any) -> Any:
        reply = self.post("completions", {"model": next(iter(self.engine.models)), "prompt": prompt, **options})
        assert reply.status == 200, reply.body
        return reply.json


TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' }}{{ m.reasoning_content or '' }}{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments }}</tool_call>"
    "{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}"
    "{% if think %}<think>{# </think> #}{% endif %}{% endif %}"
)


def make_talker(folder: Path, **changes: Any) -> Path:
    """A chat model so small that hundreds of its tokens take no time. changes: of its configuration."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = tiny_config(hidden_size=16, intermediate_size=24, num_hidden_layers=1, **sizes, **changes)
    write_checkpoint(folder, config, random_weights(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def serving(start: bool = True, **options: Any) -> Iterator[Client]:
    """Options of ServeConfig, on NumPy's device unless another is named. start: False leaves `engine.run` to a test."""
    config = ServeConfig(**{"model": str(BASE), "device": "cpu", "port": 0, **options})
    engine, preparation = load(open_model(config), config.adapters)
    listening = listen(resolve(config.host, config.port))
    server = HttpServer(guarded(engine, preparation, config), listening, engine.close)
    device = threading.Thread(target=engine.run, daemon=True)
    server.start()
    if start:
        device.start()
    try:
        yield Client(listening.getsockname()[1], engine)
    finally:
        engine.close()
        if start:
            device.join(30)
        server.stop()
