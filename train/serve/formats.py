"""Grammars of `response_format` and of forced tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.inference.guide import json_grammar, json_rule, lark_of, regex_grammar
from wgrad.train.options.option_names import did_you_mean
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.tool_calls import ToolFormat

_KEY = "response_format"
_KINDS = ("text", "json_object", "json_schema", "regex", "grammar")
_ANY = "/(.|\\n)*/"


def _wrong(rule: str) -> ApiError:
    return ApiError(400, f"the request: {_KEY}{rule}", _KEY)


def schema_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of a response_format, or None if it has none. Raises ApiError."""
    if given.get("type") == "json_object":
        return {"type": "object"}
    if given.get("type") != "json_schema":
        return None
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise _wrong(".json_schema.schema must be an object: give the schema there")
    return schema


def grammar_of(given: Mapping[str, Any], call: str = "") -> str:
    """Return the grammar of a response_format; "" for text. call: the rule of an answer that is a tool call.

    Raises:
        ApiError: the response_format is wrong.
    """
    kind = given.get("type")
    try:
        if kind == "text":
            return ""
        if (schema := schema_of(given)) is not None:
            return f"start: json | {call}\njson: {json_rule(schema)}" if call else json_grammar(schema)
        if kind not in _KINDS:
            got = "none" if kind is None else f"{str(kind)[:100]!r}{did_you_mean(str(kind)[:100], _KINDS)}"
            raise _wrong(f".type must be one of {', '.join(_KINDS)}; got {got}: correct it")
        key = "pattern" if kind == "regex" else "grammar"
        text = given.get(key)
        if not isinstance(text, str) or not text:
            raise _wrong(f".{key} must be text: give the {kind} there")
        if call:
            raise _wrong(f": {kind} and tools do not go together: leave out one, or give tool_choice 'none'")
        return regex_grammar(text) if kind == "regex" else lark_of(text)
    except WgradError as error:
        raise _wrong(f": {error}") from error


def call_rule(form: ToolFormat, tokenizer: Tokenizer, names: Collection[str]) -> str:
    """Return the rule of an answer that is a tool call instead of JSON."""
    if form.marker:
        return f"{_text(form.marker, tokenizer)} {_ANY}"
    properties = {"name": {"enum": [*names]}, form.key: {"type": "object"}}
    return json_rule(
        {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    )


def arguments_grammar(
    form: ToolFormat, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], chosen: str | None
) -> str:
    """Return the grammar of the text after `form.opening(chosen)`: a call with arguments that fit a tool.

    Raises:
        ApiError: a tool's schema cannot be used.
    """
    ways = list[str]()
    for tool in (tool["function"] for tool in tools):
        if chosen in (None, tool["name"]):
            schema = tool.get("parameters")
            try:
                rule = json_rule(schema if isinstance(schema, dict) and schema else {"type": "object"})
            except WgradError as error:
                raise ApiError(400, f"the request: tools: {error}", "tools") from error
            opening, begun = (form.opening(name) for name in (tool["name"], chosen))
            ways.append(f"{_text(opening.removeprefix(begun), tokenizer)} {rule} {_text(form.ending, tokenizer)}")
    return f"start: {' | '.join(f'way{n}' for n in range(len(ways)))}\n" + "\n".join(
        f"way{n}: {way}" for n, way in enumerate(ways)
    )


def _text(text: str, tokenizer: Tokenizer) -> str:
    """Return a text as part of a Lark grammar, with special tokens by id."""
    parts, rest = list[str](), text
    for marker in ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<tool_call>", "</tool_call>"):
        id_ = tokenizer.special_id(marker)
        if id_ is not None and marker in rest:
            before, _, rest = rest.partition(marker)
            parts += [json.dumps(before)] * bool(before) + [f"<[{id_}]>"]
    return " ".join(parts + [json.dumps(rest)] * bool(rest))
