"""Readers of the library and of `wgrad serve`, which no command of one line reaches: `request KIND`, `tensors`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors.numpy

from tests.fuzz.case import Case
from tests.fuzz.texts import conversation
from tests.fuzz.values import mutate_bytes, mutate_value, write_json
from tests.fuzz.weights import mutate_safetensors
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

REQUEST, TENSORS = "request", "tensors"
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
    "model": "m", "temperature": 1, "top_p": 1, "top_k": 1, "n": 2, "seed": 1, "stop": ["a"], "stream": True,
    "logit_bias": {"1": 2}, "presence_penalty": 0, "frequency_penalty": 0, "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
}  # fmt: skip
_TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "x"}]
_OLLAMA = {
    "model": "m:latest",
    "options": _OPTIONS,
    "keep_alive": "5m",
    "stream": False,
    "format": _SCHEMA,
    "think": True,
}
_BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatRequest, _DRAWING | {"messages": _TURNS, "tools": [_TOOL], "tool_choice": "auto", "logprobs": True}),
    "completion": (CompletionRequest, _DRAWING | {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": False}),
    "embedding": (EmbeddingRequest, {"model": "m", "input": ["a", "b"], "encoding_format": "float", "dimensions": 3}),
    "responses": (ResponsesRequest, {"model": "m", "input": _TURNS, "tools": [_TOOL | _TOOL["function"]], "text": {}}),
    "ollama-chat": (OllamaChat, _OLLAMA | {"messages": _TURNS, "tools": [_TOOL]}),
    "ollama-generate": (OllamaGenerate, _OLLAMA | {"prompt": "a", "system": "b", "raw": False, "context": [1, 2]}),
    "ollama-embed": (OllamaEmbed, {"model": "m", "input": ["a"], "truncate": True, "dimensions": 2, "options": {}}),
    "ollama-embedding": (OllamaEmbedding, {"model": "m", "prompt": "a", "options": {"num_ctx": 9}, "keep_alive": -1}),
    "ollama-show": (OllamaShow, {"model": "m", "name": "", "verbose": True}),
}  # fmt: skip


def request_case(rng: Random, groups: Any) -> Case:
    """A body for a path of `wgrad serve`."""
    kind = rng.choice(sorted(_BODIES))
    whole = dict(_BODIES[kind][1])
    for name in rng.sample(sorted(whole), rng.randrange(len(whole))):
        del whole[name]
    if rng.random() < 0.4 and ("messages" in whole or "input" in whole):
        whole["messages" if "messages" in whole else "input"] = conversation(rng)
    return Case([REQUEST, kind], [], {"body.json": write_json(rng, mutate_value(rng, whole))})


def tensors_case(rng: Random, groups: Any) -> Case:
    """A file for `wgrad.load`."""
    kinds = (np.float32, np.float16, np.int32, np.uint32, np.uint8, np.int64, np.float64, np.bool_)
    arrays = {f"t{i}": np.ones(rng.choice(((2, 3), (0,), (), (1, 4, 1))), rng.choice(kinds)) for i in range(3)}
    data = safetensors.numpy.save(arrays, {"format": "pt"})
    changed = mutate_safetensors(rng, data) if rng.random() < 0.9 else mutate_bytes(rng, data)
    return Case([TENSORS, "x.safetensors"], [], {"x.safetensors": changed})


def read_request(name: str) -> int:
    """What the server does with a body before a model is asked."""
    try:
        asked: Any = parse_request(Path("body.json").read_bytes(), _BODIES[name][0])
        if isinstance(asked, OllamaBody):
            asked.check()
            asked.refuse_unload()
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


def read_tensors(name: str) -> int:
    """As a user's program does."""
    from wgrad.autograd.tensor_files import load_tensors
    from wgrad.device.errors import WgradError

    try:
        for found in load_tensors(name, requires_grad=True, device="cpu").values():
            found.numpy()
    except WgradError as error:
        print(f"wgrad: error: {error}", file=sys.stderr)
        return 2
    return 0


READERS: dict[str, Callable[[str], int]] = {REQUEST: read_request, TENSORS: read_tensors}
