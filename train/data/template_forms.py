"""The inputs that a chat template takes: its roles, contents as text or lists of parts, and the arguments of calls as
objects or JSON text.

A template does not declare them, so it is tried on short conversations, once for each question.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str | None]  # None where the template refuses the messages

REASONING = ("reasoning_content", "thinking", "reasoning")  # synonymous keys, the usual one first
TEXT_TYPES = ("text", "input_text", "output_text")  # types of parts that are text
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_A, _B = "qzfirst", "qzsecond"  # words that no template contains
_ARGUMENTS = {_A: [1, _B]}


def _call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "callabcde", "function": {"name": "add", "arguments": arguments}}


def _calling(arguments: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations in which a tool is called."""
    ask, result = {"role": "user", "content": "What?"}, {"role": "tool", "content": "3", "tool_call_id": "callabcde"}
    for said in ({"content": ""}, {}, {"content": "So."}):
        yield [ask, {"role": "assistant", **said, "tool_calls": [_call(arguments)]}, {**result, "name": "add"}]


def _around(message: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations with the message in every place that its role may have."""
    asks, says = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
    listed = [dict(m, content=[{"type": "text", "text": m["content"]}]) for m in (asks, says)]
    for ask, say in ((asks, says), listed):
        if message["role"] in ("system", "developer"):
            yield [message, ask]
            yield [message, ask, say]
        elif message["role"] == "user":
            yield [message]
            yield [message, say]
        elif message["role"] == "assistant":
            yield [ask, message]
        else:
            yield [
                ask,
                {"role": "assistant", "content": "", "tool_calls": [_call({"a": 1})]},
                {**message, "tool_call_id": "callabcde"},
            ]
        yield [ask, message]
        yield [ask, message, ask]
        yield [ask, say, message]


class TemplateForms:
    """The inputs that one template takes, found on demand. render: renders a conversation, None if it is refused."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[str, bool] = {}
        self._contents: dict[str, str] = {}
        self._arguments = ""

    def knows(self, role: str) -> bool:
        """Return whether a turn of this role leaves anything in the rendering."""
        if role not in self._known:
            forms = (_A, [{"type": "text", "text": _A}])
            tried = (c for form in forms for c in _around({"role": role, "content": form}))
            self._known[role] = any(_A in (self._render(conversation) or "") for conversation in tried)
        return self._known[role]

    def roles(self) -> str:
        """List the usual roles that it knows, for an error."""
        return ", ".join(role for role in _ROLES if self.knows(role))

    def contents(self, role: str) -> str:
        """Return the kind of content that this role takes: "text", "parts" (a list of them), "part" (a list of one), or
        "both" text and parts."""
        if role not in self._contents:
            self._contents[role] = self._find_contents(role)
        return self._contents[role]

    def _find_contents(self, role: str) -> str:
        forms = [_A + _B], [_A, _B]
        one, two = (_around({"role": role, "content": [{"type": "text", "text": t} for t in form]}) for form in forms)
        by_text = by_part = by_parts = False
        for text, part, parts in zip(_around({"role": role, "content": _A + _B}), one, two):
            plain = self._render(text) or ""
            by_text = by_text or _A + _B in plain
            by_part = by_part or self._takes(part, plain)
            by_parts = by_parts or self._takes(parts, plain)
            if by_text or by_parts:
                break
        if by_text == by_parts:
            return "part" if by_part and not by_parts else "both"
        return "text" if by_text else "parts"

    def _takes(self, messages: Sequence[Message], plain: str) -> bool:
        """Return whether all parts of a content are written. plain: the same conversation with text instead."""
        rendered = self._render(messages) or ""
        # A list that is written as such shows its keys.
        keys = sum(rendered.count(key) - plain.count(key) for key in ("'type'", '"type"'))
        return keys <= 0 and 0 <= rendered.find(_A) < rendered.find(_B)

    def arguments(self) -> str:
        """Return the kind of arguments that calls of tools take: "object", "text" (of JSON), or "both"."""
        self._arguments = self._arguments or self._find_arguments()
        return self._arguments

    def _find_arguments(self) -> str:
        text = json.dumps(_ARGUMENTS)
        for by_object, by_text in zip(_calling(_ARGUMENTS), _calling(text)):
            objects, texts = self._render(by_object) or "", self._render(by_text) or ""
            if objects == texts:
                if _A in objects:
                    break
                continue
            if _A in objects and f"{{'{_A}'" not in objects:  # not an object written as text
                return "object"
            if text in texts:
                return "text"
        return "both"


def other_part(content: Any) -> str | None:
    """Describe the first part of a content that is not text; None if all are."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            return "is neither text nor an object"
        if "type" not in part and isinstance(part.get("text"), str):
            continue
        kind = part.get("type")
        if kind not in TEXT_TYPES:
            return f"is of type {ascii(kind)[:40]}" if kind is not None else "has no 'type'"
        if not isinstance(part.get("text"), str):
            return "is of type 'text' but has no 'text'"
    return None


def in_form(content: Any, form: str) -> Any:
    """Return a content in the form that the template takes. For one text, or a list of one, the parts are joined."""
    if isinstance(content, list) and form in ("text", "part"):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form in ("parts", "part") else content
    if isinstance(content, list):  # templates look for the type "text"
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else ({**part, "type": "text"} if part.get("type") != "text" else part)
            for part in content
        ]
    return content


def with_arguments(calls: Any, form: str) -> Any:
    """Return tool calls with arguments in the form that the template takes. Text that is not a JSON object is kept."""
    if isinstance(calls, list):
        return [with_arguments(call, form) for call in calls]
    if not isinstance(calls, dict):
        return calls
    if isinstance(calls.get("function"), dict):
        return {**calls, "function": with_arguments(calls["function"], form)}
    given = calls.get("arguments")
    if form == "text" and isinstance(given, dict):
        return {**calls, "arguments": json.dumps(given, ensure_ascii=False)}
    if form == "object" and isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return calls
        return {**calls, "arguments": value} if isinstance(value, dict) else calls
    return calls
