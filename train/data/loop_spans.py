"""The spans of an assistant's turn by the passes through a template's loop over the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # characters [start, end) of the rendered text


@dataclass(frozen=True)
class Shape:
    """How a template writes a turn of the assistant.

    header: the text that begins each turn, and that a generation prompt also gives; it never counts for the loss.
    end: the text that ends a turn, whether others follow or not.
    is_told: the template's loop writes each turn while it is at that message.
    unasked: the generation prompt if the template writes it after every conversation, else empty.
    """

    header: str
    end: str
    bos: str
    is_told: bool
    unasked: str = ""


def spans_by_loop(
    text: str, places: Sequence[Span], behind: int, is_first: bool, is_last: bool, shape: Shape
) -> list[Span]:
    """Return the spans of a turn; empty if no pass was at it.

    Args:
        text: The rendered text, without an unasked prompt.
        places: What each pass at the turn wrote.
        behind: Where the text behind the loop begins.
        is_first, is_last: Whether the conversation begins or ends with the turn.
        shape: Shape of the template's turns.
    """
    spans = list(places)
    if not spans and is_last and text[behind:].strip():
        spans = [(behind, len(text))]  # the last turn is written outside the loop
    if not spans:
        return []
    start, end = spans[0]
    spans[0] = (start + _given(text[start:end], is_first, shape.header, shape.bos), end)
    start, end = spans[-1]
    if is_last and end == behind and text[behind:].strip():
        end = len(text)
    end = start + len(text[start:end].rstrip(" "))
    spans[-1] = (start, end + _still_to_come(text, end, shape.end))
    return [(a, b) for a, b in spans if a < b]


def _still_to_come(text: str, at: int, end: str) -> int:
    """Return how many characters after `at` are the rest of `end`, which the next turn writes."""
    for size in range(len(end), -1, -1):
        if text.endswith(end[:size], 0, at) and text.startswith(end[size:], at):
            return len(end) - size
    return 0


def whole_tags(text: str) -> str:
    """Remove an incomplete tag from the end of a text."""
    for opening, closing in ("<>", "[]"):
        if text.rfind(opening) > text.rfind(closing):
            text = text[: text.rfind(opening)]
    return text


def _given(text: str, opens: bool, header: str, bos: str) -> int:
    """Return how many characters at the start of a turn were not written by the assistant. opens: the turn is the
    first, so its text may include what the template writes before all turns (bos, a default system prompt)."""
    if header and opens and header in text:
        return text.index(header) + len(header)
    blanks = len(text) - len(text.lstrip())
    for place in (0, blanks):
        for wanted in (header, header.rstrip()):  # a turn may have nothing after the header, not even a newline
            if wanted and text.startswith(wanted, place):
                return place + len(wanted)
    return len(bos) if opens and bos and text.startswith(bos) else 0


def end_that_begins(text: str, others: Sequence[str]) -> str:
    """Return the longest end of a text with which all others begin; "" if there are no others."""
    ends = (text[at:] for at in range(len(text)))
    return next((end for end in ends if others and all(other.startswith(end) for other in others)), "")
