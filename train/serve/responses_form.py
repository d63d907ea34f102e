"""Answers of `/v1/responses`: the response, and the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from wgrad.train.serve.answer_parts import Part
from wgrad.train.serve.answers import EVENTS, Choice, Octets, TokenText, token_entry
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.jobs import LENGTH, Piece, TokenInfo
from wgrad.train.serve.responses_request import ResponsesRequest
from wgrad.train.serve.tool_calls import Call

_Events = Iterator[dict[str, Any]]


class ResponsesForm:
    """A response with one answer, whose parts are items of its output: reasoning, a message, function calls."""

    end, media_type = "", EVENTS

    def __init__(self, request: ResponsesRequest, token_text: TokenText, octets: Octets = lambda token: None) -> None:
        self._request, self._token_text, self._octets = request, token_text, octets
        self._id, self._created = _new_id("resp"), int(time.time())
        self._output = list[dict[str, Any]]()
        self._open: dict[str, Any] | None = None  # the last item of the output, which grows
        self._number = 0  # of the next event

    # ---- a whole response ----------------------------------------------------------------------
    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        piece = Piece(choice.text, choice.tokens, choice.new, choice.finish)
        for _ in self._of_piece(choice, piece):
            pass
        return self._response(choice)

    def _response(self, choice: Choice | None, status: str = "", error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response. choice: None before it has ended."""
        asked, whole = self._request, choice is None or choice.finish != LENGTH
        told = None
        if choice is not None:
            told = {
                "input_tokens": choice.prompt_tokens,
                "input_tokens_details": {"cached_tokens": choice.cached},
                "output_tokens": choice.new,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": choice.prompt_tokens + choice.new,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status or ("completed" if whole else "incomplete"),
            "background": False,
            "error": error,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "instructions": asked.instructions or None,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": self._output if choice is not None else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format or {"type": "text"}},
            "tool_choice": asked.tool_choice,
            "tools": asked.tools,
            "top_logprobs": asked.top_logprobs,
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": told,
            "metadata": {},
        }

    # ---- a stream ------------------------------------------------------------------------------
    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        response = self._response(None, "in_progress")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def events(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        return list(self._of_piece(choice, piece))

    def closing(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        response = self._response(choices[0])
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        told = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._response(None, "failed", told))]

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        # A copy, since the values continue to grow.
        return {"type": kind, "sequence_number": self._number - 1, **msgspec.to_builtins(values)}

    # ---- items ---------------------------------------------------------------------------------
    def _of_piece(self, choice: Choice, piece: Piece) -> _Events:
        part: Part = choice.parts.add(piece.text, last=bool(piece.finish))
        if part.reasoning:
            yield from self._text("reasoning", part.reasoning, ())
        if part.content or (piece.finish and not part.calls and not self._has_message()):
            yield from self._text("message", part.content, piece.tokens if self._request.top is not None else ())
        if piece.finish:
            yield from self._close("incomplete" if piece.finish == LENGTH else "completed")
        for call in part.calls:
            yield from self._call(call)

    def _has_message(self) -> bool:
        return any(item["type"] == "message" for item in self._output)

    def _place(self) -> dict[str, Any]:
        """Return the id and index of the last item, for its events."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _text(self, kind: str, text: str, tokens: Sequence[TokenInfo]) -> _Events:
        """Yield the events of text for an item of this kind, which is begun if it is not the open one."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        (content,) = self._open["content"]
        content["text"] += text
        told = [token_entry(token, self._token_text, self._octets) for token in tokens]
        if kind == "message":
            content["logprobs"] += told
            if text:
                yield self._event(
                    "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=told
                )
        elif text:
            yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _begin(self, kind: str) -> _Events:
        item: dict[str, Any]
        if kind == "message":
            item = {"id": _new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": _new_id("rs"), "type": kind, "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        item["content"] = [part]
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _close(self, status: str) -> _Events:
        """Yield the events that end the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        (part,) = item["content"]
        if item["type"] == "message":
            item["status"] = status
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._place(), content_index=0, **told)
        else:
            yield self._event("response.reasoning_text.done", **self._place(), content_index=0, text=part["text"])
        yield self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _call(self, call: Call) -> _Events:
        entry = call.entry()
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": entry["id"],
            "name": call.name,
            "arguments": "",
        }
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        item["arguments"], item["status"] = call.arguments, "completed"
        yield self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **self._place(), **done)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
