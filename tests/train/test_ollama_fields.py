"""Every field of Ollama's API: answered, without effect for a reason that is given here, or refused by its name.

Source of the names: api/types.go of github.com/ollama/ollama (commit fb30760).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.serving import Client, make_talker, serving
from wgrad.train.data.tokenizer import load_tokenizer
from wgrad.train.serve.ollama import _context
from wgrad.train.serve.ollama_requests import MESSAGE_KEYS, OF_LOADING, Options

CONTEXT = 200
# It thinks where it is told to, at a length, and knows no tools.
THINKER = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking %}{{ '<think>' }}{% else %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}{{ 'assistant:' }}"
USER: Any = [{"role": "user", "content": "Hear, my son"}]
GREEDY = {"temperature": 0, "num_predict": 6}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Any = {"id": "a1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def make(folder: Path, template: str | None) -> str:
    make_talker(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name, t) for name, t in (("talker", None), ("thinker", THINKER), ("plain", PLAIN))}


@pytest.fixture(scope="module")
def talker(folders: dict[str, str]) -> Iterator[Client]:
    with serving(model=folders["talker"], context=CONTEXT) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(folders: dict[str, str]) -> Iterator[Client]:
    with serving(model=folders["thinker"], context=CONTEXT) as client:
        yield client


def ask(client: Client, path: str, status: int = 200, **value: Any) -> Any:
    sent = {"model": next(iter(client.engine.models)), **({} if path == "show" else {"stream": False}), **value}
    reply = client.ask("POST", f"/api/{path}", json.dumps(sent).encode(), {"Content-Type": "application/json"})
    assert reply.status == status, reply.body
    return reply.json


# ---- requests ----------------------------------------------------------------------------------
ANSWERED = "answered"  # tests of what comes of it are below, or in test_serve_ollama.py
COMMON: dict[str, tuple[Any, str]] = {
    "model": ("talker:latest", ANSWERED),
    "stream": (False, ANSWERED),
    "format": (SCHEMA, ANSWERED),
    "options": (GREEDY, ANSWERED),
    "logprobs": (True, ANSWERED),
    "top_logprobs": (2, ANSWERED),
    "keep_alive": ("5m", "models stay loaded: at least as long"),
    "think": (True, ANSWERED),
    "truncate": (True, ANSWERED),
    "shift": (True, "shift is not supported: an answer ends where the context is full"),
    "_debug_render_only": (True, "_debug_render_only is not supported"),
}
CHAT = {**COMMON, "messages": (USER, ANSWERED), "tools": ([TOOL], ANSWERED)}
GENERATE = {
    **COMMON,
    "prompt": ("x", ANSWERED),
    "system": ("be brief", ANSWERED),
    "raw": (True, ANSWERED),
    "context": ([1, 2, 3], ANSWERED),
    "suffix": ("y", "suffix is not supported"),
    "template": ("{{ .Prompt }}", "template is not supported: the chat template that the model was trained with"),
    "images": (["AA=="], "images is not supported: this model reads only text"),
}
MESSAGE = {
    "role": ("User", ANSWERED),
    "content": ("x", ANSWERED),
    "thinking": ("hm", ANSWERED),
    "tool_calls": ([CALL], ANSWERED),
    "tool_name": ("f", ANSWERED),
    "tool_call_id": ("a1", ANSWERED),
    "images": (["AA=="], r"messages\[0\].images: this model reads only text"),
    "contnet": ("x", r"messages\[0\].'contnet' is no key of this server .*content"),
}
EMBED = {
    "model": ("talker", ANSWERED),
    "input": (["a", "b"], ANSWERED),
    "keep_alive": (-1, "models stay loaded"),
    "truncate": (False, ANSWERED),
    "dimensions": (4, ANSWERED),
    "options": ({"num_ctx": 64}, "the context is that of --context"),
}
EMBEDDING = {
    "model": ("talker", ANSWERED),
    "prompt": ("x", ANSWERED),
    "keep_alive": (10, "models stay loaded"),
    "options": ({}, "no option changes a vector"),
}
SHOW = {
    "model": ("talker", ANSWERED),
    "name": ("talker", ANSWERED),
    "options": ({}, "what is shown does not hang on them"),
    "system": ("x", "system is not supported"),
    "template": ("x", "template is not supported"),
    "verbose": (True, "verbose is not supported"),
}
RUNNER = {"num_ctx": 64, "num_batch": 8, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 2,
          "draft_num_predict": 4, "num_keep": 4}  # fmt: skip
DRAWN = {"seed": 1, "num_predict": 4, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "temperature": 0.5, "repeat_penalty": 1.2,
         "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["z"]}  # fmt: skip
OPTIONS = {
    **{name: (value, "of loading") for name, value in RUNNER.items()},
    **{name: (value, ANSWERED) for name, value in DRAWN.items()},
    "repeat_last_n": (0, ANSWERED),
    "typical_p": (0.5, "options.typical_p is not supported"),
    "tfs_z": (0.5, "options.tfs_z is not supported"),
    "mirostat": (2, "options.mirostat is not supported"),
    "penalize_newline": (False, "options.penalize_newline is not supported"),
    "num_predit": (1, "num_predit"),
}
TABLES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[Any, str]]]] = {
    "ChatRequest": ("chat", {"messages": USER, "options": GREEDY}, CHAT),
    "GenerateRequest": ("generate", {"prompt": "x", "options": GREEDY}, GENERATE),
    "Message": ("chat", {"options": GREEDY}, MESSAGE),
    "EmbedRequest": ("embed", {"input": "x"}, EMBED),
    "EmbeddingRequest": ("embeddings", {"prompt": "x"}, EMBEDDING),
    "ShowRequest": ("show", {}, SHOW),
    "Options": ("generate", {"prompt": "x", "raw": True}, OPTIONS),
}


def sent(kind: str, name: str, value: Any) -> dict[str, Any]:
    rest = TABLES[kind][1]
    if kind == "Message":
        return {**rest, "messages": [{"role": "user", "content": "x", name: value}]}
    return {**rest, "options": {"num_predict": 4, name: value}} if kind == "Options" else {**rest, name: value}


@pytest.mark.parametrize("kind", TABLES)
def test_each_field_is_answered_or_refused_by_its_name(talker: Client, kind: str) -> None:
    path, _, table = TABLES[kind]
    for name, (value, outcome) in table.items():
        refused = re.search(r"is not supported|is no key|only text|^num_predit$", outcome)
        found = ask(talker, path, 400 if refused else 200, **sent(kind, name, value))
        if refused:
            assert re.search(outcome, found["error"]), (name, found)


def test_the_table_of_options_has_those_that_are_read() -> None:
    assert set(OPTIONS) - {"num_predit"} >= {*Options.__struct_fields__} - {"mirostat_eta", "mirostat_tau"}
    assert set(RUNNER) <= OF_LOADING and set(MESSAGE) - {"contnet", "images"} <= set(MESSAGE_KEYS)


# ---- answers -----------------------------------------------------------------------------------
METRICS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
LAST = {"model", "created_at", "done", "done_reason", *METRICS}
DETAILS = {"parent_model", "format", "family", "families", "parameter_size", "quantization_level", "context_length",
           "embedding_length"}  # fmt: skip
LISTED = {"name", "model", "modified_at", "size", "digest", "details", "capabilities"}
SHOWN = {"modelfile", "parameters", "template", "details", "model_info", "capabilities", "modified_at"}


def test_answers_have_the_fields_of_ollamas(talker: Client) -> None:
    """Those that it leaves out where they are empty may be missing, and `ps` tells what `tags` does as well."""
    assert set(ask(talker, "chat", messages=USER, options=GREEDY)) == LAST | {"message"}
    assert set(ask(talker, "generate", prompt="x", options=GREEDY)) == LAST | {"response", "context"}
    assert set(ask(talker, "generate", prompt="x", raw=True, options=GREEDY)) == LAST | {"response"}
    assert set(ask(talker, "generate", prompt="")) == {"model", "created_at", "response", "done", "done_reason"}
    assert set(ask(talker, "embed", input="x")) == {
        "model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"
    }  # fmt: skip
    assert set(ask(talker, "embeddings", prompt="x")) == {"embedding"}
    shown = ask(talker, "show")
    assert set(shown) == SHOWN and set(shown["details"]) == DETAILS
    (listed,), (running,) = (talker.ask("GET", f"/api/{path}").json["models"] for path in ("tags", "ps"))
    assert set(listed) == LISTED and set(running) == LISTED | {"expires_at", "size_vram", "context_length"}


def test_a_context_goes_on_with_an_answer(talker: Client) -> None:
    first = ask(talker, "generate", prompt="Hear, my son", options=GREEDY)
    alone = ask(talker, "generate", prompt="And they", options=GREEDY)
    begun, count = first["context"], alone["prompt_eval_count"]
    assert len(begun) > first["prompt_eval_count"]
    second = ask(talker, "generate", prompt="And they", context=begun, options=GREEDY)
    prompt = begun + alone["context"][:count]
    assert second["prompt_eval_count"] == len(prompt) and second["context"][: len(prompt)] == prompt
    assert second["response"] == talker.complete(prompt, temperature=0, max_tokens=6)["choices"][0]["text"]
    for context, message in (([9**9], "context: token ids must be between"), ([1] * CONTEXT, "at most the 200 pos")):
        assert message in ask(talker, "generate", 400, prompt="x", context=context)["error"]


def test_an_answer_that_ended_ends_its_turn_in_the_context() -> None:
    tokenizer: Any = SimpleNamespace(turn_end_id=7, encode=lambda text, add_special_tokens: [ord(c) for c in text])
    assert _context(tokenizer, [1], "ab", "stop") == [1, 97, 98, 7]
    assert _context(tokenizer, [1], "ab", "length") == [1, 97, 98]


def test_a_role_is_read_in_small_letters(talker: Client) -> None:
    shouted = [{"role": "USER", "content": USER[0]["content"]}]
    assert (
        ask(talker, "chat", messages=shouted, options=GREEDY)["message"]
        == (ask(talker, "chat", messages=USER, options=GREEDY)["message"])
    )


def test_the_earliest_turns_of_a_long_conversation_are_left_out(talker: Client) -> None:
    turns = [{"role": ("assistant", "user")[n % 2], "content": f"turn {n:02d}"} for n in range(1, 60)]
    system = [{"role": "system", "content": "be brief"}]
    found = ask(talker, "chat", messages=[*system, *turns], options=GREEDY)
    body: dict[str, Any] = {"model": "talker", "stream": False, "options": GREEDY, "truncate": False}
    for begin in range(0, len(turns), 2):  # users' turns
        value = json.dumps({**body, "messages": [*system, *turns[begin:]]}).encode()
        reply = talker.ask("POST", "/api/chat", value)
        if reply.status == 200:
            break
        assert "must be at most the 200 positions" in reply.json["error"]
    assert 0 < begin < 58 and reply.json["message"] == found["message"]
    assert reply.json["prompt_eval_count"] == found["prompt_eval_count"] > CONTEXT - 50
    long = [*turns, {"role": "user", "content": "no " * CONTEXT}]
    assert "positions that this server has" in ask(talker, "chat", 400, messages=long)["error"]


def test_a_long_text_is_embedded_as_far_as_there_is_room(talker: Client, folders: dict[str, str]) -> None:
    text = "A wise son maketh a glad father. " * 40
    tokenizer = load_tokenizer(folders["talker"])
    before, behind = map(len, tokenizer.added_ids())
    ids, whole = tokenizer.encode_first(CONTEXT, text), tokenizer.encode(text)
    room = CONTEXT - behind
    assert (
        len(ids) == CONTEXT < len(whole) and ids[:room] == whole[:room] and ids[room:] == whole[len(whole) - behind :]
    )
    assert before + behind < CONTEXT
    found = ask(talker, "embed", input=text)
    assert found["prompt_eval_count"] == CONTEXT
    wanted = talker.post("embeddings", {"model": "talker", "input": ids}).json["data"][0]["embedding"]
    np.testing.assert_allclose(found["embeddings"][0], wanted, atol=1e-6)
    assert "must be at most the 200 positions" in ask(talker, "embed", 400, input=text, truncate=False)["error"]


def test_a_shorter_vector_has_length_1_again(talker: Client) -> None:
    whole = np.array(ask(talker, "embed", input="gold")["embeddings"][0])
    first = np.array(ask(talker, "embed", input="gold", dimensions=5)["embeddings"][0])
    np.testing.assert_allclose(first, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert "dimensions must be at most 16; got 17" in ask(talker, "embed", 400, input="gold", dimensions=17)["error"]


def test_no_text_has_no_vector(talker: Client) -> None:
    empties: list[Any] = ["", []]
    for empty in empties:
        assert ask(talker, "embed", input=empty)["embeddings"] == []
    assert ask(talker, "embeddings", prompt="")["embedding"] == []


@pytest.mark.parametrize("value", [0, "0", "0s", 0.0])
def test_a_request_to_unload_is_answered_and_the_model_stays(talker: Client, value: Any) -> None:
    for path, empty in (("generate", {"prompt": ""}), ("chat", {"messages": []})):
        found = ask(talker, path, keep_alive=value, **empty)
        assert found["done"] and found["done_reason"] == "unload"
        assert ask(talker, path, keep_alive="10m", **empty)["done_reason"] == "load"
    assert talker.ask("GET", "/api/ps").json["models"]
    assert ask(talker, "generate", prompt="x", keep_alive=value, options=GREEDY)["done_reason"] == "length"


@pytest.mark.parametrize("value", ["soon", "5", "5 m", True])
def test_a_time_to_stay_loaded_is_a_time(talker: Client, value: Any) -> None:
    assert "keep_alive" in ask(talker, "chat", 400, messages=USER, keep_alive=value)["error"]


def count(client: Client, **value: Any) -> int:
    found: int = ask(client, "chat", messages=USER, options=GREEDY, **value)["prompt_eval_count"]
    return found


def test_thoughts_are_turned_on_and_off_where_the_template_can(thinker: Client, talker: Client) -> None:
    on, off = count(thinker, think=True), count(thinker, think=False)
    assert off == count(thinker) != on
    low, high = count(thinker, think="low"), count(thinker, think="high")
    assert low != on and high != low and count(thinker, think="max") == high
    assert (
        "one of 'high', 'medium', 'low', 'max', true, false"
        in ask(thinker, "chat", 400, messages=USER, think="much")["error"]
    )
    assert "knows no levels" in ask(talker, "chat", 400, messages=USER, think="low")["error"]
    assert "cannot leave thoughts out" in ask(talker, "chat", 400, messages=USER, think=False)["error"]


def test_nothing_is_dropped_that_a_template_has_no_place_for(folders: dict[str, str]) -> None:
    with serving(model=folders["plain"]) as client:
        assert "'plain' does not support thinking" in ask(client, "chat", 400, messages=USER, think=True)["error"]
        assert count(client, think=False) == count(client)
        assert "tools: the chat template has no place" in ask(client, "chat", 400, messages=USER, tools=[TOOL])["error"]
        asked = {"model": "plain", "messages": USER, "tools": [TOOL], "max_tokens": 3}
        assert client.post("chat/completions", asked).error["param"] == "tools"
        assert client.post("chat/completions", {**asked, "tool_choice": "none"}).status == 200
        for name, value in (("system", "be brief"), ("think", True), ("context", [1])):
            refused = ask(client, "generate", 400, prompt="x", raw=True, **{name: value})["error"]
            assert f"{name} is not supported where raw is given" in refused
