"""Answers in the form of Ollama's API: one JSON object, or one on each line of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from wgrad.train.serve.answer_parts import Part
from wgrad.train.serve.answers import Choice
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.jobs import Piece, TokenInfo

LINES = "application/x-ndjson"


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaForm:
    """An answer of `/api/chat`, or of `/api/generate` where it is not a chat's.

    entry: writes the log-probabilities of a token; None: they were not asked for. context: ids of the prompt and of an
    answer, from its text and why it ended; None: they are not told.
    """

    end, media_type = "", LINES

    def __init__(self, model: str, chat: bool) -> None:
        self._model, self._chat = model, chat
        self.entry: Callable[[TokenInfo], dict[str, Any]] | None = None
        self.context: Callable[[str, str], list[int]] | None = None
        self._begun = time.monotonic_ns()

    def _line(self, part: Part, tokens: Sequence[TokenInfo] = (), done: bool = False) -> dict[str, Any]:
        said: dict[str, Any] = {"thinking": part.reasoning} if part.reasoning else {}
        if self._chat:
            if part.calls:
                said["tool_calls"] = [_call(number, call.entry()) for number, call in enumerate(part.calls)]
            said = {"message": {"role": "assistant", "content": part.content, **said}}
        else:
            said = {"response": part.content, **said}
        if self.entry and tokens:
            said["logprobs"] = [self.entry(token) for token in tokens]
        return {"model": self._model, "created_at": now(), **said, "done": done}

    def _last(self, part: Part, choice: Choice, tokens: Sequence[TokenInfo] = ()) -> dict[str, Any]:
        """Return the last line, with durations in nanoseconds. Models are loaded before any request."""
        end = time.monotonic_ns()
        first = choice.first or end
        return {
            **self._line(part, tokens, done=True),
            "done_reason": choice.finish,
            **({"context": self.context(choice.text, choice.finish)} if self.context else {}),
            "total_duration": end - self._begun,
            "load_duration": 0,
            "prompt_eval_count": choice.prompt_tokens,
            "prompt_eval_duration": first - self._begun,
            "eval_count": choice.new,
            "eval_duration": end - first,
        }

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        return self._last(choice.parts.add(choice.text, last=True), choice, choice.tokens)

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return []

    def events(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        part = choice.parts.add(piece.text, last=bool(piece.finish))
        told = part.content or part.reasoning or part.calls or (self.entry and piece.tokens)
        return [self._line(part, piece.tokens)] if told else []

    def closing(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        (choice,) = choices
        return [self._last(Part(), choice)]

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [{"error": error.message}]


def without_answer(model: str, chat: bool, unloads: bool) -> dict[str, Any]:
    """Return the answer to a request without a prompt, by which clients load a model or unload it.

    A model that is unloaded stays in memory here, and `/api/ps` goes on to list it.
    """
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    reason = "unload" if unloads else "load"
    return {"model": model, "created_at": now(), **said, "done": True, "done_reason": reason}


def _call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object."""
    function = call["function"]
    return {
        "id": call["id"],
        "function": {"index": number, "name": function["name"], "arguments": json.loads(function["arguments"])},
    }
