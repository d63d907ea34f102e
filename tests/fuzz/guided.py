"""Grammars that constrain an answer, and calls that it makes: schemas of `response_format` and of tools, regular
expressions, Lark and GBNF; `calls FORM` reads a model's text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.base import GENERATE
from tests.fuzz.case import Case, Files
from tests.fuzz.readers import SERVED
from tests.fuzz.texts import odd_text
from tests.fuzz.values import hostile, mutate_bytes, mutate_value, write_json
from wgrad.train.serve.tool_calls import GRANITE, LIST, TAG, ToolFormat

CALLS = "calls"
_PATTERNS = (
    "a",
    "[0-9]{3}",
    "^a$",
    "(a+)+$",
    "(?=a)b",
    "(?!a)",
    r"\d+\w\s\b",
    "[",
    "(",
    "*",
    "a{1,100000}",
    "a{9999999999}",
    "",
    "(a|b){50}" * 9,
    r"\p{L}+",
    r"\u00e9",
    "\x00",
    "(?i)a",
    r"(\1)",
    "[^\\s\\S]",
    "a{2,1}",
    ".*" * 40,
    "\ud800",
    "a\\",
    "$",
    "(" * 400 + "a" + ")" * 400,
    r"(?P<x>a)(?P=x)",
    "x" * 5000,
    r"[\d-z]",
    "\n",
)
_LARK = (
    'start: "a"',
    "start: A\nA: /[a-z]+/",
    "start: start",
    "start: x",
    "",
    'start: %json {"type": "object"}',
    "x: /a/",
    'start: "a" | start "b"',
    "start: <[1]>",
    "start: <[99999999]>",
    "start: <nope>",
    'start: "a"~3',
    'start: "a"{1,99999}',
    "start: /(/",
    "%llguidance {}\nstart: /a/",
    "start: @sub",
    'start: %json {"$ref": "#"}',
    "start[temperature=1e999]: /a/",
    "start: " + "( " * 300 + '"a"' + " )" * 300,
    'start: "\\ud800"',
    "start: %regex {}",
    "start: gen\ngen[capture]: /a/",
)
_GBNF = (
    'root ::= "a"',
    "root ::= root",
    'root ::= "yes" | "no"',
    "root ::= [a-z]+ ",
    'root ::= (x | "b")* \nx ::= [^"]',
    "root ::=",
    'root ::= "\\x41" [\\u00e9] . ',
    "root ::= [",
    'root ::= "a"{2,3}',
    "a ::= b",
    'root ::= "' + "a" * 3000 + '"',
    "root ::= " + "(" * 300 + '"a"' + ")" * 300,
    '# x\nroot ::= "a" # y',
    'root ::= a-b\na-b ::= "x"?',
    "root ::= [^]",
    "::=",
    'root ::= "a"{99999999}',
    "root ::= \u00e9",
    'root ::= "a" |',
    "root ::= [z-a]",
    'root ::= "\\q"',
)
_NUMBERS = (0, 1, 2, -1, 0.5, 10, 1e9, 2**63, 1e308, -0.0, 10**30, 3.3333333333333335)
_FORMS = {
    "tags": ToolFormat(TAG),
    "list": ToolFormat(LIST),
    "granite": ToolFormat(GRANITE),
    "names": ToolFormat(LIST, named=True),
    "bare": ToolFormat("", "parameters"),
}
_ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
# Templates whose words tell the form of calls.
_TEMPLATES = tuple(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}"
    + mark
    + "{% endif %}<a>"
    for mark in (
        "<tool_call></tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]x[ARGS]",
        "<|tool_call|>",
        "<|python_tag|>",
        "",
    )
)
_TEXTS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}]',
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    '[TOOL_CALLS]f[ARGS]{"a": 1}',
    '<|tool_call|>[{"name": "f", "arguments": "{\\"a\\": 1}"}]',
    '{"name": "f", "parameters": {"a": 1}}; {"name": "f"}',
    '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
    '{"function": {"name": "f", "arguments": {}}}',
    "[" * 90_000,
    '{"a":' * 50_000,
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": 1' + "0" * 5000 + "}}",
)


def _schema(rng: Random, depth: int = 0) -> Any:
    """A JSON schema of a few keywords, most of them in order."""
    if rng.random() < 0.08:
        return rng.choice((True, False, {}, hostile(rng)))
    kind = rng.choice(("object", "array", "string", "string", "integer", "number", "boolean", "null"))
    schema: dict[str, Any] = {"type": kind if rng.random() < 0.9 else rng.choice(([kind, "null"], [], "any", None, 1))}
    keys = rng.sample(_KEYWORDS, rng.choice((0, 1, 1, 2, 4)))
    if kind in ("object", "array") and depth < 3:
        keys.append(
            rng.choice(("properties", "additionalProperties") if kind == "object" else ("items", "prefixItems"))
        )
    for key in keys:
        schema[key] = _keyword(rng, key, depth)
    return schema


_KEYWORDS = (
    "pattern",
    "format",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
    "uniqueItems",
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "$defs",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "contains",
    "dependentRequired",
    "default",
    "x-guidance",
    "nullable",
    "$schema",
    "$id",
    "title",
    "description",
)


def _keyword(rng: Random, key: str, depth: int) -> Any:
    if rng.random() < 0.1:
        return hostile(rng)
    if key == "pattern":
        return rng.choice(_PATTERNS)
    if key == "format":
        return rng.choice(("date-time", "email", "uuid", "ipv6", "uri", "regex", "x", "", "date", "hostname"))
    if key in ("enum", "required", "default"):
        return [rng.choice(("a", "b", "", "\u00e9", "\x00", "a b", 1)) for _ in range(rng.choice((0, 1, 2, 300)))]
    if key == "const":
        return rng.choice(("a", 1, None, {"a": [1]}, 1e300))
    if key == "$ref":
        return rng.choice(("#", "#/$defs/a", "#/$defs/nope", "https://example.org/x", "", "#/%", "file:///etc/passwd"))
    if key == "x-guidance":
        return rng.choice(
            ({"whitespace_pattern": "("}, {"item_separator": ""}, {"whitespace_flexible": False}, [], {"x": 1})
        )
    if key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [_schema(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 2)))]
    if key in ("properties", "patternProperties", "$defs"):
        names = rng.sample(("a", "b", "", "\u00e9", "^a", "(", 'a"b', "x" * 300, "\n"), rng.choice((1, 1, 2, 3)))
        return {name: _schema(rng, depth + 1) for name in names}
    if key in ("items", "not", "if", "additionalProperties", "propertyNames", "contains"):
        return _schema(rng, depth + 1) if depth < 3 else True
    return rng.choice(_NUMBERS) if key.startswith(("m", "e")) else rng.choice((True, "x", {"a": ["b"]}))


def _format(rng: Random) -> Any:
    """A response_format."""
    kind = rng.choice(("json_schema", "json_schema", "json_schema", "regex", "grammar", "json_object", "text"))
    given: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        given[kind] = {"name": "x", "schema": _schema(rng), "strict": rng.random() < 0.5}
    elif kind == "regex":
        given["pattern"] = rng.choice(_PATTERNS)
    elif kind == "grammar":
        given[kind] = _grammar(rng)
    return mutate_value(rng, given) if rng.random() < 0.15 else given


def _grammar(rng: Random) -> str:
    text = rng.choice((*_LARK, *_GBNF))
    return mutate_bytes(rng, text.encode("utf-8", "replace")).decode("utf-8", "replace") if rng.random() < 0.4 else text


def _tools(rng: Random) -> list[Any]:
    tools = []
    for name in rng.choices(("f", "g", "", "a b", "\u00e9", "x" * 100, "f"), k=rng.choice((1, 1, 2, 3))):
        function = {"name": name, "description": odd_text(rng)[:99], "parameters": _schema(rng)}
        tools.append({"type": "function", "function": function})
    return mutate_value(rng, tools) if rng.random() < 0.15 else tools


def _asked(rng: Random) -> tuple[str, Any]:
    """The kind of a request, and its body."""
    kind = rng.choice(("chat", "chat", "chat", "completion", "ollama-chat", "ollama-generate", "responses"))
    if kind == "completion":
        return kind, {"prompt": "a", "max_tokens": 3, "response_format": _format(rng)}
    if kind == "responses":
        text = {"format": {"type": "json_schema", "name": "x", "schema": _schema(rng)}}
        tools = [{"type": "function", "name": name, "parameters": _schema(rng)} for name in ("f", "g")]
        tools = mutate_value(rng, tools) if rng.random() < 0.2 else tools
        return kind, {
            "input": "a",
            "text": text if rng.random() < 0.5 else {},
            "tools": tools if rng.random() < 0.5 else [],
        }
    if kind == "ollama-generate":
        return kind, {"prompt": "a", "format": _schema(rng), "options": {"num_predict": 3}}
    body: dict[str, Any] = {**_ASK, "messages": list(_ASK["messages"])}  # type: ignore[call-overload]
    if rng.random() < 0.6:
        body["tools"] = _tools(rng)
        if kind == "chat":
            named = {"type": "function", "function": {"name": rng.choice(("f", "g", "nope", ""))}}
            body["tool_choice"] = rng.choice(("auto", "required", "required", "none", named, named, hostile(rng)))
    if kind == "ollama-chat":
        body["format"] = _schema(rng) if rng.random() < 0.6 else rng.choice(("json", "", None, "xml"))
    elif rng.random() < 0.6:
        body["response_format"] = _format(rng)
    return kind, body


def guided_case(rng: Random, groups: Any) -> Case:
    """A request with a grammar or tools, a prompt with --json-schema or --regex, or a text with calls."""
    chance = rng.random()
    if chance < 0.15:
        text = rng.choice(_TEXTS)
        data = text.encode() if rng.random() < 0.3 else mutate_bytes(rng, text.encode())
        return Case([CALLS, rng.choice(sorted(_FORMS))], [], {"text": data})
    if chance < 0.35:
        words = (
            ["--regex", rng.choice(_PATTERNS).replace("\x00", "")]
            if rng.random() < 0.4
            else ["--json-schema", "x.json"]
        )
        return Case([*GENERATE, "x", *words], ["model"], {"x.json": write_json(rng, _schema(rng))})
    kind, body = _asked(rng)
    files: Files = {"body.json": write_json(rng, {"model": "model", **body})}
    if rng.random() < 0.7:
        files["model/chat_template.jinja"] = rng.choice(_TEMPLATES).encode()
    return Case([SERVED, kind], ["model"], files)


def read_calls(name: str) -> int:
    """Find the calls of a text that a model could have written."""
    found = _FORMS[name].calls(Path("text").read_bytes().decode("utf-8", "replace"), ["f", "g"])
    for call in found or []:
        assert call.name in ("f", "g") and isinstance(json.loads(call.arguments), dict)
        json.dumps(call.entry())
    return 0


CALL_READERS: dict[str, Callable[[str], int]] = {CALLS: read_calls}
