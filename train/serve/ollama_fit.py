"""Conversations that are longer than the context: the earliest turns are left out, as Ollama does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from wgrad.train.serve.errors import ApiError
from wgrad.train.serve.preparation import TOO_LONG
from wgrad.train.serve.requests import ChatRequest

T = TypeVar("T")


def fitting(request: ChatRequest, make: Callable[[ChatRequest], T]) -> T:
    """Make something of a conversation, or of as much of its end as fits.

    What remains begins with a user's turn, behind all system messages in front of it. ApiError: of `make`; also where
    the last user's turn does not fit.
    """
    turns = request.messages
    starts = [number for number, turn in enumerate(turns) if turn.get("role") == "user"]
    if starts and all(turn.get("role") == "system" for turn in turns[: starts[0]]):
        del starts[0]  # nothing would be left out
    try:
        return make(request)
    except ApiError as error:
        if error.code != TOO_LONG or not starts:
            raise
        refused = error
    first, last, found = 0, len(starts) - 1, None
    while first <= last:
        middle = (first + last) // 2
        begin = starts[middle]
        system = [turn for turn in turns[:begin] if turn.get("role") == "system"]
        try:
            found = make(replace(request, messages=[*system, *turns[begin:]]))
            last = middle - 1
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            first, refused = middle + 1, error
    if found is None:
        raise refused
    return found
