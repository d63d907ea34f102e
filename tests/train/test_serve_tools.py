"""Calls of tools and reasoning in the answers of a server: each family's text, whole and as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.serving import make_talker, serving
from wgrad.train.data.thoughts import thought_of
from wgrad.train.serve.answer_parts import AnswerParts, Style
from wgrad.train.serve.answers import ChatForm, Choice
from wgrad.train.serve.jobs import Piece
from wgrad.train.serve.tool_calls import format_of

QWEN = "{% if tools %}<tools>{% endif %}<tool_call>\n{...}</tool_call> {{ '<think>' }}</think>"
MISTRAL, SINCE_2025 = "[AVAILABLE_TOOLS] [TOOL_CALLS] [", "[AVAILABLE_TOOLS][TOOL_CALLS]name[ARGS]{}"
GRANITE, LLAMA = "<|tool_call|>[...]", 'Respond as {"name": ..., "parameters": ...} <|python_tag|>'
TOOLS = ("weather", "time")
THOUGHT = ("<think>", "</think>")
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n</parameter>"
TWO = (
    f'<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{{"name": "time", "arguments": {{"zone": "<b>"}}}}\n</tool_call>'
)
OTHER = '<tool_call>{"name": "other", "arguments": {}}'
PARAMETERS = '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time", "parameters": {}}'
NAMED = 'Well: [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]time{"zone": 1}'
CALLED = ("weather", {"city": "Rome"})

# template, answer -> content, reasoning, calls
ANSWERS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    (QWEN, f"<tool_call>\n{ROME}\n</tool_call>", "", "", [CALLED]),
    (
        QWEN,
        f"<think>\nHm.\n</think>\n\nLet me look.\n{TWO}",
        "Let me look.",
        "Hm.\n",
        [CALLED, ("time", {"zone": "<b>"})],
    ),
    (QWEN, f"{XML}\n</function>\n</tool_call>", "", "", [("weather", {"city": "New\nYork", "days": 3})]),
    (QWEN, "a < b <tool", "a < b <tool", "", []),
    (QWEN, "<think>never closed", "", "never closed", []),
    (QWEN, OTHER, OTHER, "", []),
    (QWEN, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", "", []),
    (MISTRAL, f'[TOOL_CALLS] [{ROME}, {{"name": "time", "arguments": "{{}}"}}]', "", "", [CALLED, ("time", {})]),
    (SINCE_2025, NAMED, "Well: ", "", [CALLED, ("time", {"zone": 1})]),
    (GRANITE, '<|tool_call|>[{"name": "time", "arguments": {"zone": null}}]', "", "", [("time", {"zone": None})]),
    (LLAMA, PARAMETERS, "", "", [CALLED, ("time", {})]),
    (LLAMA, '<|python_tag|>{"function": {"name": "time", "parameters": {}}}', "", "", [("time", {})]),
    (LLAMA, '{"city": "Rome"}', '{"city": "Rome"}', "", []),
    (LLAMA, 'Say {"name": "time"}', 'Say {"name": "time"}', "", []),
]


def parts(template: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    found = AnswerParts(Style(thought_of(template), "", format_of(template), TOOLS))
    made = [found.add(piece, last=number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    calls = [(call.name, json.loads(call.arguments)) for part in made for call in part.calls]
    return "".join(part.content for part in made), "".join(part.reasoning for part in made), calls


@pytest.mark.parametrize(("template", "answer", "content", "reasoning", "calls"), ANSWERS)
def test_an_answer_is_taken_apart(
    template: str, answer: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    """The same in one piece, by characters, and in pairs of them."""
    for width in (len(answer), 1, 2):
        pieces = [answer[at : at + width] for at in range(0, len(answer), width)]
        assert parts(template, [*pieces, ""]) == (content, reasoning, calls)


def test_text_flows_until_a_marker_may_begin() -> None:
    found = AnswerParts(Style(THOUGHT, "", format_of(QWEN), TOOLS))
    given = [found.add(piece, last=False) for piece in ("Hi ", "there <to", "ol> ", "<tool_call>{")]
    assert [part.content for part in given] == ["Hi ", "there ", "<tool> ", ""]


def test_forms_of_an_answer_with_calls() -> None:
    style = Style(None, '<tool_call>\n{"name": "', format_of(QWEN), TOOLS)
    rest = 'time", "arguments": {"zone": 1}}\n</tool_call>'
    form = ChatForm("m", False, str)
    whole = Choice(0, 3, style=style)
    whole.add(Piece(rest, new=4, finish="stop"))
    (choice,) = form.answer([whole])["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None} and choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "time", "arguments": '{"zone": 1}'} and len(call["id"]) == 9
    chunked = Choice(0, 3, style=style)
    pieces = (Piece(rest[:9]), Piece(rest[9:], finish="stop"))
    first, last = (form.chunk(chunked, piece)["choices"][0] for piece in pieces)
    assert (first["delta"], first["finish_reason"]) == ({}, None)
    assert last["delta"]["tool_calls"][0]["index"] == 0 and last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("template", [QWEN, MISTRAL, SINCE_2025, GRANITE, LLAMA])
def test_a_call_that_is_begun_for_the_model_is_read_as_its_own(template: str) -> None:
    form = format_of(template)
    assert form is not None
    end = "" if form.named else "}]" if form.opening(None).endswith('[{"name": "') else "}"
    assert form.calls(form.opening("time") + '{"zone": 1}' + end, TOOLS) == [("time", '{"zone": 1}')]


TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] + ': ' }}{{ m['content'] or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments }}</tool_call>"
    "{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


def test_tools_of_a_request_are_in_the_prompt_or_refused(tmp_path: Path) -> None:
    folder = make_talker(tmp_path / "talker")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ask: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Now?"}], "max_tokens": 4}
    chosen = {"type": "function", "function": {"name": "time"}}
    with serving(model=str(folder)) as client:

        def tokens(**options: Any) -> int:
            reply = client.post("chat/completions", {**ask, **options})
            assert reply.status == 200, reply.body
            return int(reply.json["usage"]["prompt_tokens"])

        plain, with_tools = tokens(), tokens(tools=[TOOL])
        assert plain < with_tools < tokens(tools=[TOOL], tool_choice="required")
        assert tokens(tools=[TOOL], tool_choice="none") == plain
        called = {"id": "abcdefghi", "type": "function", "function": {"name": "time", "arguments": "{}"}}
        turns = [*ask["messages"], {"role": "assistant", "content": None, "tool_calls": [called]}]
        assert tokens(messages=[*turns, {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"}]) > with_tools
        begun = client.post("chat/completions", {**ask, "max_tokens": 1, "tools": [TOOL], "tool_choice": chosen}).json
        content = begun["choices"][0]["message"]["content"]
        assert content.startswith('<tool_call>\n{"name": "time", "arguments": '), "what was begun is part of the answer"
        other = {"type": "function", "function": {"name": "x"}}
        keys: list[dict[str, Any]] = [{"parameters": []}, {"description": 5}]
        broken = [{"type": "function", "function": {"name": "f", **key}} for key in keys]
        for options, message in (
            ({"tools": [{"type": "function"}]}, "tools[0] must be an object with type 'function' and function.name"),
            ({"tools": broken[:1]}, "tools[0].function.parameters must be an object, a JSON schema; got an empty list"),
            ({"tools": broken[1:]}, "tools[0].function.description must be text; got a number"),
            ({"tool_choice": "required"}, "tool_choice 'required' goes with tools"),
            ({"tools": [TOOL], "tool_choice": other}, "'x' is none of the tools"),
        ):
            reply = client.post("chat/completions", {**ask, **options})
            assert reply.status == 400 and message in reply.error["message"]
