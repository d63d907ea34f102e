"""Requests of `/v1/responses` about text, turned into those of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.requests import MOST_TOP, ChatRequest, Request

_LOGPROBS = "message.output_text.logprobs"
_KEPT = "this server keeps no answers: send the earlier items in input"
# Names in this API of a conversation's keys, for errors.
NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format", "logprobs": "include",
}  # fmt: skip
_OF_BOTH = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stream", "chat_template_kwargs",
)  # fmt: skip


class TextOptions(Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, frozen=True):
    effort: str | None = None  # for templates that know it


class ResponsesRequest(Request, kw_only=True):
    passed_over = {*Request.passed_over, "truncation"}
    unsupported = {"previous_response_id": (), "conversation": (), "prompt": (), "background": (False,)}
    in_place = {"previous_response_id": _KEPT, "conversation": _KEPT}

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str = ""
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    n: Literal[1] = 1
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: list[str] = []
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] = 0
    chat_template_kwargs: dict[str, Any] = {}
    max_tool_calls: int | None = None

    @property
    def top(self) -> int | None:
        return self.top_logprobs if _LOGPROBS in self.include else None

    def as_chat(self) -> ChatRequest:
        """Return the request as a conversation. Raises ApiError."""
        chosen = self.tool_choice
        return ChatRequest(
            messages=_Turns(self.instructions).read(self.input),
            tools=[_tool(number, tool) for number, tool in enumerate(self.tools)],
            tool_choice=chosen if isinstance(chosen, str) else _nested(chosen),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort,
            response_format=_format(self.text.format),
            logprobs=self.top is not None,
            top_logprobs=self.top or 0,
            **{name: getattr(self, name) for name in _OF_BOTH},
        )


def _format(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return a text format in the form of a conversation. Raises ApiError."""
    if given is None or given.get("type") != "json_schema":
        return given or {"type": "text"}
    if not isinstance(given.get("schema"), dict):
        raise _wrong("text.format.schema must be an object: give the schema there", "text.format")
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of a conversation."""
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        got = str(tool.get("type"))[:100]
        raise _wrong(f"tools[{number}].type must be 'function'; got {got!r}: leave it out", "tools")
    if not isinstance(tool.get("name"), str):
        raise _wrong(f"tools[{number}].name must be text: give the function's name there", "tools")
    return _nested(tool)


def _wrong(rule: str, key: str = "input") -> ApiError:
    return ApiError(400, f"the request: {rule}", key)


class _Turns:
    """Messages of a conversation, from the items of an input."""

    def __init__(self, instructions: str) -> None:
        self._turns = list[dict[str, Any]]()
        self._names = dict[str, str]()  # of the functions, by the ids of their calls
        self._thought = ""
        if instructions:
            self._turns.append({"role": "system", "content": instructions})

    def read(self, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        for number, item in enumerate(items):
            self._read(f"input[{number}]", item)
        return self._turns

    def _read(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            self._thought += _text(f"{where}.content", parts)
        elif kind == "function_call":
            call = {name: item.get(name) for name in ("name", "arguments")}
            if not all(isinstance(value, str) for value in (*call.values(), item.get("call_id"))):
                raise _wrong(f"{where} must have call_id, name and arguments as texts: correct it")
            self._names[item["call_id"]] = item["name"]
            turn = self._assistant()
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
        elif kind == "function_call_output":
            id_, output = item.get("call_id"), item.get("output")
            if not isinstance(id_, str) or id_ not in self._names:
                raise _wrong(f"{where}.call_id must be that of a function_call before it; got {str(id_)[:100]!r}")
            said = _text(f"{where}.output", output)
            self._turns.append({"role": "tool", "tool_call_id": id_, "name": self._names[id_], "content": said})
        else:
            raise _wrong(f"{where}.type {str(kind)[:100]!r} is not supported: leave the item out")

    def _message(self, where: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), _text(f"{where}.content", item.get("content"))
        first = self._turns[0] if len(self._turns) == 1 else {}
        if role in ("system", "developer") and first.get("role") == "system":  # templates take one
            first["content"] += f"\n\n{content}"
        elif role == "assistant":
            self._assistant()["content"] = content
        else:
            self._turns.append({"role": role, "content": content})

    def _assistant(self) -> dict[str, Any]:
        """Return the assistant's current turn."""
        if not self._turns or self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": ""})
        if self._thought:
            self._turns[-1]["reasoning_content"], self._thought = self._thought, ""
        return self._turns[-1]


def _text(where: str, given: Any) -> str:
    """Return the text of a content, or of its parts. Raises ApiError."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, list) else [None]
    found = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(parts):
        raise _wrong(f"{where}: only text can be read, and parts with a text")
    return "".join(texts)
