"""Ollama's API of `wgrad serve`: answers equal those of OpenAI's API, and requests are those of real clients."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.train.serving import Client, Reply, make_talker, serving
from wgrad.train.serve.answer_parts import Style
from wgrad.train.serve.answers import Choice
from wgrad.train.serve.jobs import Piece
from wgrad.train.serve.ollama_form import OllamaForm
from wgrad.train.serve.tool_calls import format_of

TURNS: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hear, my son"}]
GREEDY = {"temperature": 0, "num_predict": 8}
SCHEMA: Any = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(model=str(make_talker(tmp_path_factory.mktemp("models") / "talker")), max_new_tokens=120) as found:
        yield found


def post(client: Client, path: str, value: Any, headers: Any = JSON) -> Reply:
    return client.ask("POST", f"/api/{path}", json.dumps(value).encode(), headers)


def ask(client: Client, path: str, **value: Any) -> Any:
    reply = post(client, path, {"model": "talker", "stream": False, **value})
    assert reply.status == 200, reply.body
    return reply.json


def lines(reply: Reply) -> list[Any]:
    assert reply.status == 200 and reply.headers["content-type"] == "application/x-ndjson"
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.splitlines()]


def test_a_conversation_is_that_of_openais_path(client: Client) -> None:
    options = {"top_k": 40, "top_p": 0.9}  # Ollama's
    asked = {"model": "talker", "messages": TURNS, "temperature": 0, "max_tokens": 8, **options}
    wanted = client.post("chat/completions", asked).json
    whole = ask(client, "chat", messages=TURNS, options=GREEDY)
    text, counts = wanted["choices"][0]["message"]["content"], wanted["usage"]
    assert whole["message"] == {"role": "assistant", "content": text} and whole["done"] is True
    assert whole["done_reason"] == wanted["choices"][0]["finish_reason"] == "length"
    assert (whole["prompt_eval_count"], whole["eval_count"]) == (counts["prompt_tokens"], counts["completion_tokens"])
    assert whole["total_duration"] == whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    parts = lines(post(client, "chat", {"model": "talker:latest", "messages": TURNS, "options": GREEDY}))
    assert "".join(part["message"]["content"] for part in parts) == text and len(parts) > 1
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["eval_count"] == 8 and {part["model"] for part in parts} == {"talker:latest"}


def test_a_prompt_is_a_message_or_as_it_is(client: Client) -> None:
    chat = ask(client, "generate", prompt=TURNS[1]["content"], system="be brief", options=GREEDY)
    assert chat["response"] == ask(client, "chat", messages=TURNS, options=GREEDY)["message"]["content"]
    raw = ask(client, "generate", prompt="And they", raw=True, options=GREEDY)
    assert raw["response"] == client.complete("And they", temperature=0, max_tokens=8)["choices"][0]["text"]
    parts = lines(post(client, "generate", {"model": "talker", "prompt": "And they", "raw": True, "options": GREEDY}))
    assert "".join(part["response"] for part in parts) == raw["response"]
    whole = ask(client, "generate", prompt="And they", raw=True, options={"temperature": 0})
    assert whole["eval_count"] == 120 or whole["done_reason"] == "stop", "as many as the server gives"
    asked = {"temperature": 0, "max_tokens": 8, "repetition_penalty": 0.1}
    again = ask(client, "generate", prompt="And they", raw=True, options={**GREEDY, "repeat_penalty": 0.1})
    assert again["response"] == client.complete("And they", **asked)["choices"][0]["text"] != raw["response"]
    off = {**GREEDY, "repeat_penalty": 0.1, "repeat_last_n": 0, "num_ctx": 99, "num_gpu": 1}
    assert ask(client, "generate", prompt="And they", raw=True, options=off)["response"] == raw["response"]


def test_log_probabilities_are_those_of_openais_path(client: Client) -> None:
    asked = {"model": "talker", "messages": TURNS, "temperature": 0, "max_tokens": 8, "top_k": 40, "top_p": 0.9}
    choice = client.post("chat/completions", {**asked, "logprobs": True, "top_logprobs": 2}).json["choices"][0]
    wanted = choice["logprobs"]["content"]
    told = {"options": GREEDY, "logprobs": True, "top_logprobs": 2}
    assert ask(client, "chat", messages=TURNS, **told)["logprobs"] == wanted and len(wanted) == 8
    parts = lines(post(client, "chat", {"model": "talker", "messages": TURNS, **told}))
    assert [entry for part in parts for entry in part.get("logprobs", [])] == wanted
    raw = ask(client, "generate", prompt="And they", raw=True, options=GREEDY, logprobs=True)["logprobs"]
    assert len(raw) == 8 and all(entry["logprob"] < 0 and entry["top_logprobs"] == [] for entry in raw)
    assert "logprobs" not in ask(client, "chat", messages=TURNS, options=GREEDY, top_logprobs=2)


def test_without_a_prompt_nothing_is_written(client: Client) -> None:
    """Clients have a model loaded so."""
    for path, value in (("chat", {"messages": []}), ("generate", {"prompt": ""})):
        assert ask(client, path, **value)["done_reason"] == "load"


def test_formats_and_tools_are_taken_as_ollama_takes_them(client: Client) -> None:
    found = ask(client, "chat", messages=TURNS, format=SCHEMA, options={"num_predict": 60})
    assert 0 <= json.loads(found["message"]["content"])["age"] <= 99
    assert ask(client, "generate", prompt="x", format="json", options={"num_predict": 9})["response"].startswith("{")
    plain = ask(client, "chat", messages=TURNS, options=GREEDY)["prompt_eval_count"]
    assert ask(client, "chat", messages=TURNS, tools=[TOOL], options=GREEDY)["prompt_eval_count"] > plain
    calls = [{"function": {"name": "get_time", "arguments": {"age": 3}}}]
    turns = [*TURNS, {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "hm"}]
    turns.append({"role": "tool", "content": "noon", "tool_name": "get_time"})
    assert ask(client, "chat", messages=turns, options=GREEDY)["prompt_eval_count"] > plain + 20


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_and_thoughts_are_apart(streamed: bool) -> None:
    text = 'hm</think>Now.<tool_call>\n{"name": "get_time", "arguments": {"age": 3}}\n</tool_call>'
    style = Style(("<think>", "</think>"), "<think>", format_of("<tool_call>"), ["get_time"])
    form, choice = OllamaForm("m", chat=True), Choice(0, 5, style=style)
    found = []
    for piece in [*(Piece(c, new=1) for c in text), Piece("", finish="stop")]:
        choice.add(piece)
        found += form.events(choice, piece) if streamed else []
    messages = [line["message"] for line in (found if streamed else [form.answer([choice])])]
    assert "".join(m["content"] for m in messages) == "Now."
    assert "".join(m.get("thinking", "") for m in messages) == "hm"
    ((call,),) = [m["tool_calls"] for m in messages if "tool_calls" in m]
    assert call["function"] == {"index": 0, "name": "get_time", "arguments": {"age": 3}}


def test_embeddings_are_those_of_openais_path(client: Client) -> None:
    wanted = client.post("embeddings", {"model": "talker", "input": ["a fool", "gold"]}).json
    found = ask(client, "embed", input=["a fool", "gold"])
    np.testing.assert_allclose(found["embeddings"], [entry["embedding"] for entry in wanted["data"]], atol=1e-6)
    assert found["prompt_eval_count"] == wanted["usage"]["prompt_tokens"] and found["total_duration"] > 0
    whole = ask(client, "embed", input="gold", dimensions=0)["embeddings"]
    np.testing.assert_allclose(whole, found["embeddings"][1:], atol=1e-6)
    old = post(client, "embeddings", {"model": "talker", "prompt": "gold"}).json
    np.testing.assert_allclose(old["embedding"], found["embeddings"][1], atol=1e-6)


def test_what_is_served_is_told(client: Client) -> None:
    assert client.ask("GET", "/api/version").json["version"].count(".") == 2
    (entry,) = client.ask("GET", "/api/tags").json["models"]
    assert entry["name"] == entry["model"] == "talker" and len(entry["digest"]) == 64 and entry["size"] > 1000
    shown = post(client, "show", {"model": "talker"}).json
    assert post(client, "show", {"name": "talker:latest"}).json == shown
    family = shown["details"]["family"]
    assert shown["model_info"][f"{family}.embedding_length"] == 16 and "tools" in shown["capabilities"]
    assert shown["model_info"]["general.parameter_count"] > 1000 and "{% for m in messages %}" in shown["template"]
    assert entry["capabilities"] == shown["capabilities"] and entry["details"] == shown["details"]
    assert shown["details"]["embedding_length"] == 16
    (running,) = client.ask("GET", "/api/ps").json["models"]
    assert running["context_length"] == shown["details"]["context_length"] > 100
    assert running["size_vram"] == 0 and running["expires_at"] > "9999", "NumPy holds it"


WRONG: dict[str, tuple[str, Any, int, str]] = {
    "model": ("chat", {"model": "x", "messages": TURNS}, 404, "model 'x' is not served: choose one of 'talker'"),
    "no model": ("chat", {"model": None, "messages": TURNS}, 400, "model"),
    "no name": ("show", {"model": None}, 404, "model '' is not served"),
    "option": ("chat", {"messages": TURNS, "options": {"temprature": 1}}, 400, "temprature"),
    "value": ("chat", {"messages": TURNS, "options": {"top_p": 7}}, 400, "options.*top_p"),
    "mirostat": ("generate", {"prompt": "x", "options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
    "window": ("generate", {"prompt": "x", "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "must be -1"),
    "image": ("chat", {"messages": [{"role": "user", "content": "", "images": ["AA"]}]}, 400, r"messages\[0\].images"),
    "call": ("chat", {"messages": [{"role": "assistant", "tool_calls": [3]}]}, 400, r"tool_calls\[0\] must have"),
    "format": ("chat", {"messages": TURNS, "format": "yaml"}, 400, "format must be 'json' or a JSON schema"),
    "schema": ("chat", {"messages": TURNS, "format": {"type": "nonsense"}}, 400, "format: llguidance refuses it"),
    "limit": ("chat", {"messages": TURNS, "options": {"num_predict": 999}}, 400, "options.num_predict must be at most"),
    "key": ("chat", {"messages": TURNS, "mesages": 1}, 400, "'mesages' is no key of this server"),
    "suffix": ("generate", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    "pull": ("pull", {"model": "llama3"}, 400, "the models of this server are chosen when it starts"),
    "path": ("nonsense", {}, 404, "this server has /v1/models"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_explained(client: Client, name: str) -> None:
    path, value, status, message = WRONG[name]
    reply = post(client, path, {"model": "talker", **value})
    assert reply.status == status and list(reply.json) == ["error"], reply.body
    assert re.search(message, reply.json["error"]), reply.json["error"]


def test_json_need_not_be_called_json_but_other_sites_may_not_ask(client: Client) -> None:
    """As curl sends it in Ollama's own examples."""
    body, form = {"model": "talker", "prompt": "x", "options": GREEDY}, "application/x-www-form-urlencoded"
    assert post(client, "generate", body, {"Content-Type": form}).status == 200
    refused = post(client, "generate", body, {"Content-Type": form, "Origin": "http://evil.example"})
    assert refused.status == 403 and "Origin" in refused.json["error"]


@pytest.mark.oracle
def test_the_client_of_ollama_reads_every_answer(client: Client) -> None:
    if importlib.util.find_spec("ollama") is None:
        pytest.skip("the package ollama is not installed")
    ollama: Any = importlib.import_module("ollama")
    api = ollama.Client(host=client.url.removesuffix("/v1"))
    assert [model.model for model in api.list().models] == ["talker"] and "tools" in api.show("talker").capabilities
    whole = api.chat("talker", messages=TURNS, options=GREEDY)
    stream = list(api.chat("talker", messages=TURNS, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in stream) == whole.message.content and stream[-1].done
    assert api.generate("talker", "Hear, my son", system="be brief", options=GREEDY).response == whole.message.content
    assert len(api.embed("talker", input=["a", "b"]).embeddings) == 2
    with pytest.raises(ollama.ResponseError, match="is not served"):
        api.chat("other", messages=TURNS)
