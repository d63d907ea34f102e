"""Readers of the library and of `wgrad serve`, which no command of one line reaches: `request KIND`, `serve KIND`,
`tensors`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy

from tests.fuzz.case import Case, Files
from tests.fuzz.texts import conversation
from tests.fuzz.values import mutate_bytes, mutate_value, write_json
from tests.fuzz.weights import mutate_safetensors
from tests.fuzz.words import ROLE_TEMPLATES
from wgrad.train.serve.embeddings import EmbeddingRequest
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.ollama_requests import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaShow,
)
from wgrad.train.serve.requests import ChatRequest, CompletionRequest, parse_request
from wgrad.train.serve.responses_request import ResponsesRequest

REQUEST, SERVED, TENSORS = "request", "served", "tensors"
PATHS = {
    "chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings",
    "responses": "/v1/responses", "ollama-chat": "/api/chat", "ollama-generate": "/api/generate",
    "ollama-embed": "/api/embed", "ollama-embedding": "/api/embeddings", "ollama-show": "/api/show",
}  # fmt: skip
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0}},
    "required": ["age"],
}
_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA}}
_OPTIONS = {
    "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 1, "num_predict": 4, "stop": ["a"],
    "repeat_penalty": 1.1, "repeat_last_n": -1, "num_ctx": 64, "typical_p": 1.0, "mirostat": 0, "tfs_z": 1.0,
}  # fmt: skip
_DRAWING = {
    "temperature": 1, "top_p": 1, "top_k": 1, "n": 2, "seed": 1, "stop": ["a"], "stream": True,
    "logit_bias": {"1": 2}, "presence_penalty": 0, "frequency_penalty": 0, "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
}  # fmt: skip
_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "x"}]
_OLLAMA = {
    "model": "model:latest",
    "options": _OPTIONS,
    "keep_alive": "5m",
    "stream": False,
    "format": _SCHEMA,
    "think": True,
}
_BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatRequest, _DRAWING | {"messages": _TURNS, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True}),
    "completion": (CompletionRequest, _DRAWING | {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": False}),
    "embedding": (EmbeddingRequest, {"input": ["a", "b"], "encoding_format": "float", "dimensions": 3}),
    "responses": (ResponsesRequest, {"input": _TURNS, "tools": [_TOOL | _TOOL["function"]], "text": {}}),
    "ollama-chat": (OllamaChat, _OLLAMA | {"messages": _TURNS, "tools": [_TOOL]}),
    "ollama-generate": (OllamaGenerate, _OLLAMA | {"prompt": "a", "system": "b", "raw": False, "context": [1, 2]}),
    "ollama-embed": (OllamaEmbed, {"input": ["a"], "truncate": True, "dimensions": 2, "options": {}}),
    "ollama-embedding": (OllamaEmbedding, {"prompt": "a", "options": {"num_ctx": 9}, "keep_alive": -1}),
    "ollama-show": (OllamaShow, {"name": "", "verbose": True}),
}  # fmt: skip
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": _TURNS}, "completion": {"prompt": "a"}, "embedding": {"input": "a"},
    "responses": {"input": "a"},
    "ollama-chat": {"messages": _TURNS}, "ollama-generate": {"prompt": "a"}, "ollama-embed": {"input": "a"},
}  # fmt: skip


def request_body(rng: Random, kind: str) -> dict[str, Any]:
    """A request of some of its keys, or of all."""
    whole = {"model": "model", **_BODIES[kind][1]}
    for name in rng.sample(sorted(whole), rng.randrange(len(whole))):
        del whole[name]
    if rng.random() < 0.4 and ("messages" in whole or "input" in whole):
        whole["messages" if "messages" in whole else "input"] = conversation(rng)
    return whole


def request_case(rng: Random, groups: Any) -> Case:
    """A body for a path of `wgrad serve`."""
    kind = rng.choice(sorted(_BODIES))
    return Case([REQUEST, kind], [], {"body.json": write_json(rng, mutate_value(rng, request_body(rng, kind)))})


def served_case(rng: Random, groups: Any) -> Case:
    """A body that a server answers, most often one that is in order."""
    kind = rng.choice(sorted(PATHS))
    body: Any = _BODIES[kind][1] if rng.random() < 0.2 else request_body(rng, kind)
    body = {"model": "model", **PROMPTS.get(kind, {}), **body}
    if rng.random() < 0.5:
        body = mutate_value(rng, body)
    files: Files = {"body.json": write_json(rng, body)}
    if rng.random() < 0.3:
        files["model/chat_template.jinja"] = rng.choice(ROLE_TEMPLATES).encode()
    return Case([SERVED, kind], ["model"], files)


def tensors_case(rng: Random, groups: Any) -> Case:
    """A file for `wgrad.load`."""
    kinds = (np.float32, np.float16, np.int32, np.uint32, np.uint8, np.int64, np.float64, np.bool_)
    arrays = {f"t{i}": np.ones(rng.choice(((2, 3), (0,), (), (1, 4, 1))), rng.choice(kinds)) for i in range(3)}
    data = safetensors.numpy.save(arrays, {"format": "pt"})
    changed = mutate_safetensors(rng, data) if rng.random() < 0.9 else mutate_bytes(rng, data)
    return Case([TENSORS, "x.safetensors"], [], {"x.safetensors": changed})


def read_request(name: str) -> int:
    """Process a body as the server does before it asks a model."""
    try:
        asked: Any = parse_request(Path("body.json").read_bytes(), _BODIES[name][0])
        if isinstance(asked, OllamaBody):
            asked.check()
            _ = asked.unloads
        if isinstance(asked, OllamaEmbed):
            asked = asked.as_embedding(3)
        elif isinstance(asked, OllamaGenerate) and asked.raw:
            asked.check_plain()
            asked = asked.as_completion([1, 2, 3], 9)
        elif isinstance(asked, (OllamaChat, OllamaGenerate)):
            asked = asked.as_chat("{% if enable_thinking %}{{ reasoning_effort }}<think></think>{% endif %}")
        elif isinstance(asked, ResponsesRequest):
            asked = asked.as_chat()
        if isinstance(asked, EmbeddingRequest):
            asked.texts(3)
        elif isinstance(asked, OllamaShow):
            assert asked.served is not None
        else:
            _draw(asked)
    except ApiError as error:
        assert 400 <= error.status < 500 and len(error.message) < 3000, f"{error.status}: {len(error.message)}"
    return 0


def _draw(asked: ChatRequest | CompletionRequest) -> None:
    assert asked.sampling and asked.stops is not None and (asked.top or 0) >= 0
    if isinstance(asked, CompletionRequest):
        assert asked.prompts()
    else:
        json.dumps([asked.turns(), asked.tool_names(), asked.template_options(), asked.most_tokens])


def read_served(name: str) -> int:
    """Ask a server in this process, and see that it answers in the form of its API."""
    from wgrad.train.commands.serve import guarded, load
    from wgrad.train.inference.open_model import open_model
    from wgrad.train.options.serve_config import ServeConfig

    config = ServeConfig(model="model", device="cpu", context=96, max_new_tokens=4, request_log=False)
    engine, preparation = load(open_model(config), {})
    device = threading.Thread(target=engine.run, daemon=True)
    device.start()
    try:
        status, body = asyncio.run(
            _ask(guarded(engine, preparation, config), PATHS[name], Path("body.json").read_bytes())
        )
    finally:
        engine.close()
        device.join(5)
    assert 200 <= status < 500, f"{status}: {body[:300]!r}"
    assert status == 200 or (len(body) < 4000 and "error" in json.loads(body)), f"{status}: {body[:300]!r}"
    return 0


async def _ask(app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an answer, as a web server would send them."""
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}
    scope |= {"http_version": "1.1", "asgi": {"version": "3.0"}, "root_path": "", "extensions": {}}
    requests, status, sent = [{"type": "http.request", "body": body, "more_body": False}], 0, list[bytes]()

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        sent.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(sent)


def read_tensors(name: str) -> int:
    """Read tensors as a user's program does."""
    from wgrad.autograd.tensor_files import load_tensors
    from wgrad.device.errors import WgradError

    try:
        for found in load_tensors(name, requires_grad=True, device="cpu").values():
            found.numpy()
    except WgradError as error:
        print(f"wgrad: error: {error}", file=sys.stderr)
        return 2
    return 0


READERS: dict[str, Callable[[str], int]] = {REQUEST: read_request, SERVED: read_served, TENSORS: read_tensors}
