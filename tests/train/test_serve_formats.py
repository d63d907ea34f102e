"""`wgrad serve`: answers that keep to a grammar, embeddings, and /v1/responses."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import VOCAB
from tests.train.serving import Client, Reply, make_talker, serving
from wgrad.train.data.tokenizer import Tokenizer, load_tokenizer
from wgrad.train.inference.embedding import embed, pooling_of
from wgrad.train.inference.guide import MASKED, Grammars, json_grammar
from wgrad.train.model.inputs import whole_inputs
from wgrad.train.serve.answer_parts import Style
from wgrad.train.serve.answers import Choice
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.formats import arguments_grammar, call_rule, grammar_of
from wgrad.train.serve.jobs import Piece
from wgrad.train.serve.requests import parse_request
from wgrad.train.serve.responses_form import ResponsesForm
from wgrad.train.serve.responses_request import ResponsesRequest
from wgrad.train.serve.tool_calls import GRANITE, LIST, TAG, ToolFormat

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}, "kind": {"enum": ["ant", "bee"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with serving(model=str(folder), max_new_tokens=199) as found:
        yield found


def chat(client: Client, **options: Any) -> Reply:
    messages = [{"role": "user", "content": "Hear"}]
    return client.post("chat/completions", {"model": "talker", "messages": messages, "max_tokens": 180, **options})


# ---- grammars ------------------------------------------------------------------------------------
def test_answers_keep_to_a_schema_and_those_beside_them_are_as_alone(client: Client, tokenizer: Tokenizer) -> None:
    """Ask for one answer, for several, and for a stream."""
    guided = chat(client, response_format=FORMAT, n=3, seed=3, temperature=1.5).json["choices"]
    values = [json.loads(choice["message"]["content"]) for choice in guided]
    assert all(set(value) == {"age", "kind"} and 0 <= value["age"] <= 99 for value in values)
    assert {choice["finish_reason"] for choice in guided} == {"stop"} and len({str(v) for v in values}) > 1
    chunks = [
        c["choices"][0] for c in chat(client, response_format=FORMAT, seed=3, temperature=1.5, stream=True).events
    ]
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text == guided[0]["message"]["content"] and chunks[-1]["finish_reason"] == "stop"
    cut = chat(client, response_format=FORMAT, max_tokens=2).json["choices"][0]
    assert cut["finish_reason"] == "length"
    said = chat(client, response_format={"type": "json_object"}, max_tokens=9).json["choices"][0]["message"]["content"]
    assert said.startswith("{")


def test_text_follows_expressions_and_grammars(client: Client, tokenizer: Tokenizer) -> None:
    for given, wanted in (
        ({"type": "regex", "pattern": "(ab|ba){3}"}, {"ab", "ba"}),
        ({"type": "grammar", "grammar": 'root ::= "ab" "ab" "ab"'}, {"ab"}),
        ({"type": "grammar", "grammar": 'start: "ab" "ab" /a/ "b"'}, {"ab"}),
    ):
        text = client.complete("x", response_format=given, max_tokens=9)["choices"][0]["text"]
        assert len(text) == 6 and {text[at : at + 2] for at in (0, 2, 4)} <= wanted
    bias = {str(tokenizer.encode("b", add_special_tokens=False)[0]): 90}
    options: dict[str, Any] = {"response_format": {"type": "regex", "pattern": "[ab]{4}"}, "logit_bias": bias}
    assert client.complete("x", **options)["choices"][0]["text"] == "bbbb"
    scored = client.complete("x", **{**options, "max_tokens": 1, "echo": True, "logprobs": 0})
    assert scored["choices"][0]["text"] == "xb"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "xml"}, "response_format.type must be one of text, json_object, json_schema, regex, grammar"),
        ({"type": "jsonschema"}, "did you mean json_schema?"),
        ({}, "response_format.type must be one of text, json_object, json_schema, regex, grammar; got none"),
        ({"type": "json_schema", "schema": {}}, "response_format.json_schema.schema must be an object"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}},
            "Invalid type: wat",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "response_format: no text fits it"),
        ({"type": "regex", "pattern": r"[^\s\S]"}, "response_format: no text fits it"),
        ({"type": "regex"}, "response_format.pattern must be text"),
        ({"type": "regex", "pattern": "(a"}, "unclosed group"),
        ({"type": "grammar", "grammar": "root := (("}, "Failed to convert the grammar"),
    ],
)
def test_a_wrong_format_is_refused(client: Client, given: Any, message: str) -> None:
    reply = chat(client, response_format=given)
    assert (reply.status, reply.error["param"]) == (400, "response_format") and message in reply.error["message"]


def test_without_llguidance_it_says_what_to_install(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for given in (FORMAT, {"type": "regex", "pattern": "a"}, {"type": "grammar", "grammar": 'start: "a"'}):
        reply = chat(client, response_format=given)
        assert reply.status == 400 and "pip install 'wgrad[guided]'" in reply.error["message"]
    forced = chat(client, tools=[TOOL], tool_choice="required", max_tokens=3)
    assert forced.status == 200 and chat(client, max_tokens=1).status == 200


def test_a_thought_that_the_prompt_has_begun_is_free(client: Client, tokenizer: Tokenizer) -> None:
    guide = Grammars(tokenizer, VOCAB).guides(json_grammar(SCHEMA), ["", "</think>"])[1]
    for token in tokenizer.encode("so {</think>", add_special_tokens=False):
        assert not guide.active and not guide.add(token)
    allowed = np.flatnonzero(guide.bias() > MASKED / 2)
    assert guide.active and allowed.size and len(guide.bias()) == VOCAB and guide.bias() is guide.bias()
    assert {tokenizer.token_text(int(i)).strip()[:1] for i in allowed} <= {"{"}
    ended = [guide.add(token) for token in tokenizer.encode('{"age":3,"kind":"ant"}', add_special_tokens=False)]
    assert ended == [*[False] * (len(ended) - 1), True] and not guide.error
    assert guide.add(7) and guide.error
    thinking = chat(client, response_format=FORMAT, chat_template_kwargs={"think": True}, max_tokens=5, temperature=0)
    free = chat(client, chat_template_kwargs={"think": True}, max_tokens=5, temperature=0)
    assert thinking.json["choices"] == free.json["choices"], "nothing is bound before the thought ends"


def test_a_call_that_must_be_made_has_arguments_that_the_tool_takes(client: Client, tokenizer: Tokenizer) -> None:
    other = {"type": "function", "function": {"name": "wait"}}
    for choice in ("required", {"type": "function", "function": {"name": "time"}}):
        reply = chat(client, tools=[TOOL], tool_choice=choice, temperature=1.0, seed=5).json["choices"][0]
        assert reply["finish_reason"] == "tool_calls" and reply["message"]["content"] is None
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["name"] == "time" and set(json.loads(call["function"]["arguments"])) == {"age", "kind"}
    grammars = Grammars(tokenizer, VOCAB)
    for form in (
        ToolFormat(TAG),
        ToolFormat(LIST),
        ToolFormat(GRANITE),
        ToolFormat("", "parameters"),
        ToolFormat(LIST, named=True),
    ):
        arguments = {"time": '{"age":3,"kind":"bee"}', "wait": "{}"}
        for name in arguments:
            for chosen in (None, name):
                begun = form.opening(chosen)
                whole = form.opening(name) + arguments[name] + form.ending
                (guide,) = grammars.guides(arguments_grammar(form, tokenizer, [TOOL, other], chosen), [""])
                ids = tokenizer.encode(whole.removeprefix(begun), add_special_tokens=False)
                assert [guide.add(id_) for id_ in ids][-1] and not guide.error
                assert form.calls(whole, ["time", "wait"]) == [(name, json.dumps(json.loads(arguments[name])))]


def test_with_tools_an_answer_is_a_call_or_keeps_to_the_format(client: Client, tokenizer: Tokenizer) -> None:
    for form, call in (
        (ToolFormat(TAG), '<tool_call>{"name": "time"'),
        (ToolFormat("", "parameters"), '{"name":"time","parameters":{"zone":'),
    ):
        grammar = grammar_of(FORMAT, call_rule(form, tokenizer, ["time"]))
        for text, ok in ((call, True), ('{"age":', True), ("so", False), ('{"name":"wait"', False)):
            (guide,) = Grammars(tokenizer, VOCAB).guides(grammar, [""])
            for id_ in tokenizer.encode(text, add_special_tokens=False):
                guide.add(id_)
            assert (guide.error == "") == ok, text
    for seed in range(3):
        answer = chat(client, tools=[TOOL], response_format=FORMAT, seed=seed).json["choices"][0]["message"]
        said = answer["content"]  # what is no call after all stays text
        assert said.startswith("<tool_call>") or set(json.loads(said)) == {"age", "kind"}
    refused = chat(client, tools=[TOOL], response_format={"type": "regex", "pattern": "a"})
    assert refused.status == 400 and "regex and tools do not go together" in refused.error["message"]


# ---- embeddings ----------------------------------------------------------------------------------
def outputs(client: Client, ids: list[int]) -> np.ndarray:
    """float32 [N, C] of the final norm, of one text."""
    rows = np.array([ids], np.int32), np.arange(len(ids), dtype=np.int32)[None], np.zeros((1, len(ids)), np.int32)
    model = client.engine.models["talker"]
    found: np.ndarray = model.hidden(whole_inputs(model, *rows)).data
    return found


def embeddings(client: Client, value: Any, **options: Any) -> Reply:
    return client.post("embeddings", {"model": "talker", "input": value, **options})


def test_embeddings_are_means_of_what_the_model_makes_of_tokens(client: Client, tokenizer: Tokenizer) -> None:
    texts = ["Hear, my son", "Go to the ant, thou sluggard;", "x"]
    ids = [tokenizer.encode(text) for text in texts]
    reply = embeddings(client, texts).json
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2] and reply["object"] == "list"
    assert reply["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    found = np.array([entry["embedding"] for entry in reply["data"]], np.float32)
    for vector, own in zip(found, ids):
        mean = outputs(client, own).mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-6)
    coded = embeddings(client, ids[1], encoding_format="base64", dimensions=found.shape[1], user="me").json["data"]
    one = np.frombuffer(base64.b64decode(coded[0]["embedding"]), "<f4")
    np.testing.assert_allclose(one, found[1], atol=1e-6)
    assert len(embeddings(client, [[5] * 150] * 3).json["data"]) == 3, "more than is read at once"
    for value, options, message in (
        ("x", {"dimensions": 7}, f"dimensions must be the {found.shape[1]} of this model; got 7"),
        ([], {}, "input must be text, token ids, or a list of 1 to 2048 of either"),
        ([VOCAB], {}, "input: token ids must be between 0 and"),
        ("", {}, "input has no token"),
        ("x " * 900, {}, "must be at most the 256 positions"),
        ("x", {"encoding_format": "int8"}, "encoding_format"),
    ):
        reply = embeddings(client, value, **options)
        assert reply.status == 400 and message in reply.error["message"]
    assert client.post("embeddings", {"model": "other", "input": "x"}).status == 404


def test_an_embedding_of_the_last_token(client: Client, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    assert pooling_of(tmp_path) == "mean"
    for text, wanted in (
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
    ):
        config.write_text(json.dumps(text))
        assert pooling_of(tmp_path) == wanted
    model, ids = client.engine.models["talker"], [[40, 50, 60], [70, 71]]
    vectors = embed(model, ids, "last")
    for vector, own in zip(vectors, ids):
        last = outputs(client, own)[-1]
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-6)


# ---- responses -----------------------------------------------------------------------------------
def test_a_response_is_the_answer_of_a_conversation(client: Client, tokenizer: Tokenizer) -> None:
    ask = {"model": "talker", "input": "Hear", "max_output_tokens": 6, "temperature": 0, "store": True}
    found = client.post("responses", {**ask, "instructions": "be brief"}).json
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hear"}]
    same = chat(client, messages=messages, max_tokens=6, temperature=0).json
    (item,) = found["output"]
    assert item["content"][0]["text"] == same["choices"][0]["message"]["content"] and item["role"] == "assistant"
    assert (found["object"], found["status"]) == ("response", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["input_tokens"] == same["usage"]["prompt_tokens"] and found["usage"]["output_tokens"] == 6
    values = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    whole = client.post("responses", {**ask, "max_output_tokens": 180, "text": values}).json
    assert whole["status"] == "completed" and set(json.loads(whole["output"][0]["content"][0]["text"])) == {
        "age",
        "kind",
    }


def test_events_of_a_response_add_up_to_the_whole(client: Client, tokenizer: Tokenizer) -> None:
    ask = {"model": "talker", "input": [{"role": "user", "content": "Hear"}], "max_output_tokens": 6, "temperature": 0}
    reply = client.post("responses", {**ask, "stream": True})
    lines = [part.split("\n") for part in reply.body.decode().split("\n\n")[:-1]]
    events = [json.loads(line[1].removeprefix("data: ")) for line in lines]
    assert [line[0] for line in lines] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[0]["response"]["output"] == [] and events[2]["item"]["content"] == []
    deltas = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    whole = client.post("responses", ask).json
    assert deltas == events[-4]["text"] == whole["output"][0]["content"][0]["text"]
    last = events[-1]["response"]
    assert last["usage"] == whole["usage"] and last["output"][0]["content"] == whole["output"][0]["content"]


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    style = Style(("<think>", "</think>"), "", ToolFormat(TAG), ["time"])
    text = '<think>hm</think>\n\nSo.<tool_call>{"name": "time", "arguments": {"zone": 1}}</tool_call>'
    form, choice = ResponsesForm(ResponsesRequest(model="m", input="x"), str), Choice(0, 3, style=style)
    events = form.opening([choice])
    for at in range(0, len(text), 5):
        piece = Piece(text[at : at + 5], new=1, finish="stop" if at + 5 >= len(text) else "")
        choice.add(piece)
        events += form.events(choice, piece)
    (last,) = form.closing([choice])
    thought, message, call = last["response"]["output"]
    assert thought["content"][0]["text"] == "hm" and message["content"][0]["text"] == "So."
    assert (call["name"], call["arguments"]) == ("time", '{"zone": 1}') and len(call["call_id"]) == 9
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [thought, message, call] and last["response"]["status"] == "completed"
    (failed,) = form.failure(ApiError(503, "lost"))
    assert failed["type"] == "response.failed" and failed["response"]["error"]["message"] == "lost"


def test_items_of_an_input_are_turns() -> None:
    def turns(given: Any, **options: Any) -> Any:
        return (
            parse_request(json.dumps({"model": "m", "input": given, **options}).encode(), ResponsesRequest)
            .as_chat()
            .messages
        )

    call = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "short"}]},
        {"role": "user", "content": "t?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    function = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    assert turns(items, instructions="be") == [
        {"role": "system", "content": "be\n\nshort"},
        {"role": "user", "content": "t?"},
        {"role": "assistant", "content": "Look:", "reasoning_content": "hm", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "c1", "name": "time", "content": "noon"},
    ]


def test_how_long_to_think_is_told_to_the_template() -> None:
    asked = parse_request(
        b'{"model": "m", "input": "x", "reasoning": {"effort": "low", "summary": "auto"}}', ResponsesRequest
    )
    assert asked.as_chat().template_options() == {"reasoning_effort": "low"}
    assert ResponsesForm(asked, str)._response(None)["reasoning"] == {"effort": "low", "summary": None}


@pytest.mark.parametrize(
    ("value", "param", "message"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "send the earlier items in input"),
        ({"background": True}, "background", "background is not supported"),
        ({"input": []}, "input", "input must be"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input",
            "input[0].type 'item_reference' is not supported",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text can be read"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input",
            "a function_call before",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be 'function'; got 'web_search'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools[0].name must be text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type must be one of"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "text.format.schema must be an"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity must be one of 'medium'"),
        ({"reasoning": "low"}, "reasoning", "reasoning must be an object"),
        ({"max_output_tokens": 200}, "max_output_tokens", "max_output_tokens must be at most 199 here"),
    ],
)
def test_a_response_that_cannot_be_had_is_refused(client: Client, value: Any, param: str, message: str) -> None:
    reply = client.post("responses", {"model": "talker", "input": "x", **value})
    assert (reply.status, reply.error["param"]) == (400, param) and message in reply.error["message"]


def test_a_schema_nested_too_deep_is_refused(tokenizer: Tokenizer) -> None:
    """JSON of Python 3.12 and later may be deeper than functions may call themselves."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(sys.getrecursionlimit()):
        deep = {"not": deep}
    with pytest.raises(ApiError, match="response_format: the schema is nested too deep") as caught:
        grammar_of({"type": "json_schema", "json_schema": {"schema": deep}})
    assert caught.value.status == 400
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(ApiError, match="tools: the schema is nested too deep"):
        arguments_grammar(ToolFormat(TAG), tokenizer, [tool], "f")


def test_a_grammar_that_needs_too_many_steps_is_the_fault_of_its_request(client: Client) -> None:
    given = {"type": "grammar", "grammar": 'root ::= "a"{99999999}'}
    reply = client.post("completions", {"model": "talker", "prompt": "a", "max_tokens": 3, "response_format": given})
    assert reply.status == 400 and "the grammar cannot go on" in reply.json["error"]["message"]
