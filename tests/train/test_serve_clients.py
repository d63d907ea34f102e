"""`wgrad serve` and the clients of others: openai's package, and requests as LangChain, lm-eval and Open WebUI send
them. Whole runs of LangChain and lm-eval are for `make test-all`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.serving import Client, make_talker, serving

TURNS: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hear, my son"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
}
SCHEMA: Any = {**PERSON, "required": ["name", "age"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(model=str(make_talker(tmp_path_factory.mktemp("models") / "talker")), max_new_tokens=199) as found:
        yield found


# ---- recorded ------------------------------------------------------------------------------------
RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("client_requests.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("name", sorted({request["client"].split()[0] for request in RECORDED}))
def test_requests_as_clients_send_them(client: Client, name: str) -> None:
    """Requests of lm-eval and LangChain were recorded; those of Open WebUI were put together from its source."""
    for asked in (one for one in RECORDED if one["client"].split()[0] == name):
        body, kind = asked["body"], asked["path"].removeprefix("/v1/")
        reply = client.post(kind, body)
        assert reply.status == 200, reply.body
        if body.get("stream") and kind == "chat/completions":
            last = reply.events[-1]
            assert ("usage" in last) == ("stream_options" in body)
        elif body.get("stream"):
            assert reply.body.decode().rstrip().rpartition("\n")[0].rpartition("\n")[2].startswith("event: response.")
        elif kind == "embeddings":
            assert [entry["index"] for entry in reply.json["data"]] == [0, 1]
        elif kind == "completions":
            (choice,) = reply.json["choices"]
            assert ("echo" in body) == (choice["logprobs"] is not None)
        elif "response_format" in body and body["response_format"]["type"] == "json_schema":
            assert reply.json["choices"][0]["message"]["content"].startswith("{")
        elif "tool_choice" in body:
            (choice,) = reply.json["choices"]  # a model that knows nothing may not come to the end of a name
            calls = choice["message"].get("tool_calls", [])
            assert choice["finish_reason"] == ("tool_calls" if calls else "length")
            assert all(call["function"]["name"] == body["tool_choice"]["function"]["name"] for call in calls)
        elif kind == "responses" and "text" in body:
            assert reply.json["output"][0]["content"][0]["text"].startswith("{")


# ---- the client of OpenAI ------------------------------------------------------------------------
@pytest.mark.oracle
def test_the_client_of_openai_reads_completions_and_conversations(client: Client) -> None:
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(base_url=client.url, api_key="none", max_retries=0)
    assert [model.id for model in api.models.list()] == ["talker"] and api.models.retrieve("talker").id == "talker"
    options = {"model": "talker", "temperature": 0, "max_tokens": 8}
    whole = api.chat.completions.create(messages=TURNS, logprobs=True, top_logprobs=1, **options)
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == whole.choices[0].logprobs.content[0].logprob
    stream = api.chat.completions.create(messages=TURNS, stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    told = api.completions.create(prompt="Hear, my son", echo=True, logprobs=1, **options)
    assert told.choices[0].text.startswith("Hear, my son") and told.choices[0].logprobs.token_logprobs[0] is None
    pieces = list(api.completions.create(prompt="Hear, my son", stream=True, **options))
    assert "Hear, my son" + "".join(p.choices[0].text for p in pieces) == told.choices[0].text
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(prompt="x", model="other")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="must be at most the 256 positions") as long:
        api.completions.create(prompt="x " * 900, **options, stream=True)
    assert long.value.code == "context_length_exceeded" and long.value.type == "invalid_request_error"


@pytest.mark.oracle
def test_the_client_of_openai_reads_tools_formats_and_embeddings(client: Client) -> None:
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(base_url=client.url, api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "talker", "messages": TURNS, "temperature": 0, "max_tokens": 180}
    called = api.chat.completions.create(tools=[TOOL], tool_choice="required", **options).choices[0]
    (call,) = called.message.tool_calls
    assert called.finish_reason == "tool_calls" and set(json.loads(call.function.arguments)) == {"name", "age"}
    chunks = list(api.chat.completions.create(tools=[TOOL], tool_choice="required", stream=True, **options))
    (part,) = (c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or [])
    assert part.function.model_dump() == call.function.model_dump() and part.index == 0
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    found = api.chat.completions.create(response_format=form, n=2, seed=1, **{**options, "temperature": 1})
    assert all(set(json.loads(choice.message.content)) == {"name", "age"} for choice in found.choices)
    vectors = [
        api.embeddings.create(model="talker", input=["a b", "c"], **more).data
        for more in ({}, {"encoding_format": "float"})
    ]
    assert all(a.embedding == pytest.approx(b.embedding, abs=1e-6) for a, b in zip(*vectors))


@pytest.mark.oracle
def test_the_client_of_openai_reads_responses(client: Client) -> None:
    openai = pytest.importorskip("openai")
    api = openai.OpenAI(base_url=client.url, api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": "talker", "input": "Hear", "temperature": 0, "max_output_tokens": 8}
    whole = api.responses.create(instructions="be brief", **options)
    assert whole.output_text and whole.status == "incomplete" and whole.usage.output_tokens == 8
    with api.responses.stream(instructions="be brief", **options) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    flat = {"type": "function", "name": "get_time", "parameters": SCHEMA, "strict": True}
    longer = {**options, "max_output_tokens": 180}
    called = api.responses.create(tools=[flat], tool_choice="required", **longer)
    (call,) = called.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"name", "age"}
    back = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    again = api.responses.create(tools=[flat], **{**options, "input": [{"role": "user", "content": "t?"}, call, back]})
    assert again.output_text
    with pytest.raises(openai.BadRequestError, match="send the earlier items in input"):
        api.responses.create(previous_response_id=whole.id, **options)


@pytest.mark.oracle
def test_the_client_of_openai_reports_a_wrong_key() -> None:
    openai = pytest.importorskip("openai")
    with serving(api_key="right", start=False) as found:
        options: Any = {"base_url": found.url, "max_retries": 0}
        assert openai.OpenAI(api_key="right", **options).models.list()
        with pytest.raises(openai.AuthenticationError) as refused:
            openai.OpenAI(api_key="wrong", **options).models.list()
        assert refused.value.code == "invalid_api_key" and refused.value.status_code == 401


# ---- whole runs ----------------------------------------------------------------------------------
def needs(module: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}]\n",
    "words": "output_type: generate_until\ndoc_to_target: '{{target}}'\nmetric_list: [{metric: exact_match}]\n"
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}\n',
}


@pytest.mark.all
@needs("lm_eval")
def test_lm_eval_scores_and_generates_by_both_endpoints(tmp_path: Path) -> None:
    """Log-likelihoods and texts, by both kinds of endpoints."""
    row = {"q": "Hear, my", "choices": [" son", " cat"], "gold": 0, "target": " son"}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    for name, text in TASKS.items():
        data = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\ntest_split: test\n"
        )
        (tmp_path / f"{name}.yaml").write_text(f"task: wgrad_{name}\n{data}doc_to_text: '{{{{q}}}}'\n{text}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    with serving(model=str(make_talker(tmp_path / "talker"))) as found:
        own = f",tokenizer={tmp_path}/talker,max_length=200"
        for kind, path, tasks, more in (
            ("local-completions", "completions", "wgrad_choices,wgrad_words", own),
            ("local-chat-completions", "chat/completions", "wgrad_words", ""),
        ):
            words = ["--model", kind, "--include_path", str(tmp_path), "--tasks", tasks, "--output_path", str(tmp_path)]
            words += ["--model_args", f"base_url={found.url}/{path},model=talker{more}"]
            words += ["--apply_chat_template"] if kind == "local-chat-completions" else []
            command = [sys.executable, "-m", "lm_eval", *words]
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment)
            assert done.returncode == 0 and "exact_match" in done.stdout, done.stderr


@pytest.mark.all
@needs("langchain_openai")
def test_langchain_answers_streams_and_calls_tools(client: Client) -> None:
    langchain: Any = importlib.import_module("langchain_openai")
    options: dict[str, Any] = {"model": "talker", "base_url": client.url, "api_key": "x", "max_retries": 0}
    schema = {"title": "Person", **SCHEMA}
    for responses in (False, True):
        model = langchain.ChatOpenAI(**options, max_tokens=150, temperature=0, use_responses_api=responses)
        assert model.invoke("Hear").content and list(model.stream("Hear"))
        assert set(model.with_structured_output(schema).invoke("Ann, 4")) == {"name", "age"}
        assert model.bind_tools([TOOL], tool_choice="get_time").invoke("t?").tool_calls[0]["name"] == "get_time"
    assert langchain.OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_query("a b")
