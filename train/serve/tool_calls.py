"""Tool calls in the text forms of models.

| format | of | text |
| --- | --- | --- |
| tags | Qwen, Granite 4, Hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, each call in its own |
| tags, XML | Qwen3-Coder | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` |
| list | Mistral, Granite 3 | `[TOOL_CALLS]` or `<|tool_call|>`, and a list of such objects |
| names | Mistral since 2025 | `[TOOL_CALLS]NAME[ARGS]{...}`, each call after its own marker |
| bare | Llama 3 | the whole answer is `{"name": ..., "parameters": {...}}`, several separated by `;` |
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

TAG, LIST, GRANITE, PYTHON = "<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>"
_ARGS = "[ARGS]"
_XML_CALL = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_VALUE = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_DECODER = json.JSONDecoder()


def knows_tools(template: str) -> bool:
    """Return whether a chat template has a place for tools."""
    return re.search(r"\btools\b", template) is not None


class Call(NamedTuple):
    """A tool call. arguments: JSON text."""

    name: str
    arguments: str

    def entry(self) -> dict[str, Any]:
        """Return the call in the form of OpenAI's API. Its id has nine characters, as Mistral's templates require."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


class ToolFormat(NamedTuple):
    """The form of tool calls. marker: beginning of a call; "" if the whole answer is a call. key: of the arguments.
    named: whether the name of the tool follows the marker."""

    marker: str
    key: str = "arguments"
    named: bool = False

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call of the named tool, or of any (None)."""
        if self.named:
            return self.marker if name is None else f"{self.marker}{name}{_ARGS}"
        bracket = "[" if self.marker in (LIST, GRANITE) else ""
        space = "\n" if self.marker == TAG else ""
        start = f'{self.marker}{space}{bracket}{{"name": "'
        return start if name is None else f'{start}{json.dumps(name)[1:-1]}", "{self.key}": '

    @property
    def ending(self) -> str:
        """Return the text after the arguments of the last call."""
        if self.named:
            return ""
        return "}]" if self.marker in (LIST, GRANITE) else "}\n</tool_call>" if self.marker == TAG else "}"

    def calls(self, text: str, names: Collection[str]) -> list[Call] | None:
        """Return the calls in a text; None if the text is not calls of these tools."""
        try:
            found = list(self._calls(text.strip()))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return found if found and all(call.name in names for call in found) else None

    def _calls(self, text: str) -> Iterator[Call]:
        if self.marker == TAG:
            for part in text.split(TAG):
                if part := part.partition("</tool_call>")[0].strip():
                    yield from _xml_calls(part) if part.startswith("<function=") else _json_calls(part)
        elif self.marker:
            for part in text.split(self.marker):
                if (part := part.strip()) and part[0] not in "[{":
                    name, _, arguments = part.partition("{")
                    value, _ = _DECODER.raw_decode("{" + arguments)
                    yield Call(name.removesuffix(_ARGS).strip(), json.dumps(value, ensure_ascii=False))
                elif part:
                    yield from _json_calls(part)
        else:
            yield from _json_calls(text.removeprefix(PYTHON))


def _json_calls(text: str) -> Iterator[Call]:
    """Yield the calls of objects, or lists of them, with separators between. Raises ValueError for anything else."""
    at = 0
    while at < len(text):
        value, at = _DECODER.raw_decode(text, at)
        for call in value if isinstance(value, list) else [value]:
            call = call.get("function", call) if isinstance(call.get("function"), dict) else call
            arguments = call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(call["name"] if "name" in call else None, str) or not isinstance(arguments, dict):
                raise ValueError("no call")
            yield Call(call["name"], json.dumps(arguments, ensure_ascii=False))
        while at < len(text) and text[at] in " \n\t;,":
            at += 1


def _xml_calls(text: str) -> Iterator[Call]:
    for name, body in _XML_CALL.findall(text):
        values = {key: _value(value) for key, value in _XML_VALUE.findall(body)}
        yield Call(name, json.dumps(values, ensure_ascii=False))


def _value(text: str) -> Any:
    """Decode JSON; return other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def format_of(template: str) -> ToolFormat | None:
    """Return the tool format of a chat template; None if it is unknown."""
    for marker in (LIST, GRANITE, TAG):
        if marker in template:
            return ToolFormat(marker, named=_ARGS in template)
    if PYTHON in template or '"parameters"' in template:
        return ToolFormat("", "parameters")
    return None
