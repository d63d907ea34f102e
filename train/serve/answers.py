"""Answers in the forms of OpenAI's API: whole, or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from wgrad.train.serve.answer_parts import AnswerParts, Style
from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.jobs import Piece, TokenInfo

TokenText = Callable[[int], str]
Octets = Callable[[int], bytes | None]  # bytes of a token that is a part of a character, else None
EVENTS = "text/event-stream"
TOOL_CALLS = "tool_calls"  # why an answer ended: tools are to be called


class Choice:
    """One answer of a request as it arrives. echo: text of the prompt, to begin with. style: of a chat's answers."""

    def __init__(self, number: int, prompt_tokens: int, echo: str = "", style: Style | None = None) -> None:
        self.number, self.prompt_tokens = number, prompt_tokens
        self.parts = AnswerParts(style or Style())
        self.text, self.tokens, self.new, self.finish = echo, list[TokenInfo](), 0, ""
        self.vector: np.ndarray | None = None
        self.cached = 0  # tokens of the prompt that were in the cache
        self.offset = 0  # characters of the tokens that were sent in chunks
        self.first = 0  # time of the first piece, in nanoseconds of time.monotonic_ns

    def add(self, piece: Piece) -> None:
        self.first = self.first or time.monotonic_ns()
        self.text += piece.text
        self.tokens += piece.tokens
        self.new += piece.new
        self.finish, self.vector = piece.finish, piece.vector


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    prompt, new = sum(c.prompt_tokens for c in choices), sum(c.new for c in choices)
    cached = {"cached_tokens": sum(c.cached for c in choices if c.prompt_tokens)}
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**counts, "prompt_tokens_details": cached}


class Form(Protocol):
    """The form of the answers to a request: whole, or as the events of a stream, which ends with `end`."""

    end: str
    media_type: str  # of a stream

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]: ...

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the events before any piece."""

    def events(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """Return the events of a piece that was added to its choice."""

    def closing(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the events after the last piece."""

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the last events of a stream that fails."""


class ChunkForm:
    """Common part of the two forms with chunks. logprobs: whether they are sent. tells_usage: whether a stream ends
    with the usage."""

    prefix, whole, part, end = "", "", "", "data: [DONE]\n\n"
    media_type = EVENTS

    def __init__(
        self,
        model: str,
        logprobs: bool,
        token_text: TokenText,
        tells_usage: bool = False,
        octets: Octets = lambda token: None,
    ) -> None:
        self.model, self.logprobs, self.token_text, self.tells_usage = model, logprobs, token_text, tells_usage
        self.octets = octets
        self.id, self.created = self.prefix + secrets.token_hex(12), int(time.time())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def answer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found = [self._choice(c, c.text, c.tokens, 0, c.finish, whole=True) for c in choices]
        return {**self._head(self.whole), "choices": found, "usage": usage(choices)}

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        raise NotImplementedError

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        found = self._choice(choice, piece.text, piece.tokens, choice.offset, piece.finish, whole=False)
        choice.offset += sum(token.width for token in piece.tokens)
        return {**self._head(self.part), "choices": [found]}

    def events(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        return [self.chunk(choice, piece)]

    def closing(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return [{**self._head(self.part), "choices": [], "usage": usage(choices)}] if self.tells_usage else []

    def failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body()]

    def _choice(
        self, choice: Choice, text: str, tokens: Sequence[TokenInfo], offset: int, finish: str, *, whole: bool
    ) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(ChunkForm):
    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return [self.chunk(choice, Piece(choice.text)) for choice in choices if choice.text]

    def _choice(
        self, choice: Choice, text: str, tokens: Sequence[TokenInfo], offset: int, finish: str, *, whole: bool
    ) -> dict[str, Any]:
        told = self._logprobs(tokens, offset) if self.logprobs else None
        return {"index": choice.number, "text": text, "logprobs": told, "finish_reason": finish or None}

    def _logprobs(self, tokens: Sequence[TokenInfo], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += token.width
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenInfo) -> dict[str, float] | None:
        """Return log-probabilities by text, including the token itself; for equal texts the likeliest."""
        if token.log_prob is None:
            return None
        found: dict[str, float] = {}
        for i, log_prob in (*token.top, (token.id, token.log_prob)):
            found.setdefault(token.text if i == token.id else self.token_text(i), log_prob)
        return found


class ChatForm(ChunkForm):
    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._head(self.part), "choices": [{"index": choice.number, **rest}]} for choice in choices]

    def _choice(
        self, choice: Choice, text: str, tokens: Sequence[TokenInfo], offset: int, finish: str, *, whole: bool
    ) -> dict[str, Any]:
        part = choice.parts.add(text, last=bool(finish))
        said: dict[str, Any] = {"content": part.content} if part.content or (whole and not part.calls) else {}
        if part.reasoning:
            said["reasoning_content"] = part.reasoning
        if part.calls:
            calls = [call.entry() for call in part.calls]
            said["tool_calls"] = calls if whole else [{"index": n, **call} for n, call in enumerate(calls)]
            finish = TOOL_CALLS
        if whole:
            said = {"role": "assistant", "content": None, **said}
        told = (
            {"content": [token_entry(token, self.token_text, self.octets) for token in tokens]}
            if self.logprobs
            else None
        )
        key = "message" if whole else "delta"
        return {"index": choice.number, key: said, "logprobs": told, "finish_reason": finish or None}


def token_entry(token: TokenInfo, token_text: TokenText, octets: Octets) -> dict[str, Any]:
    """Return the log-probabilities of a token of a conversation."""

    def entry(id_: int, text: str, log_prob: float | None) -> dict[str, Any]:
        """Return the entry of a token. The bytes of consecutive tokens are those of the text, also within one."""
        own = octets(id_)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode() if own is None else own)}

    top = [entry(id_, token_text(id_), log_prob) for id_, log_prob in token.top]
    return {**entry(token.id, token.text, token.log_prob), "top_logprobs": top}
