"""Thoughts of a model in the terminal: folded into a line, or shown."""

from __future__ import annotations

import time
from collections.abc import Iterator

from wgrad.train.serve.answer_parts import AnswerParts, Part, Style


class Thoughts:
    """Separates thoughts from answers. shown: whether thoughts are written. notes: whether a line stands for hidden
    ones."""

    def __init__(self, notes: bool) -> None:
        self.shown, self._notes = False, notes

    def answer(self, pieces: Iterator[str], style: Style, said: dict[str, str]) -> Iterator[str]:
        """Yield the text to write, and collect the answer's parts in `said`: content and reasoning_content."""
        parts, begun = AnswerParts(style), 0.0
        for text, last in _with_end(pieces):
            part = parts.add(text, last=last)
            if part.reasoning:
                yield self._thought(part, begun)
                begun = begun or time.monotonic()
                said["reasoning_content"] = said.get("reasoning_content", "") + part.reasoning
            if part.content:
                yield self._end(begun, "content" in said) + part.content
                said["content"] = said.get("content", "") + part.content

    def _thought(self, part: Part, begun: float) -> str:
        if self.shown:
            return part.reasoning
        return "(thinking ..." if self._notes and not begun else ""

    def _end(self, begun: float, written: bool) -> str:
        """Return the text between a thought and the answer."""
        if not begun or written:
            return ""
        if self.shown:
            return "\n\n"
        return f" {time.monotonic() - begun:.0f} s; /thoughts shows it)\n" if self._notes else ""


def _with_end(pieces: Iterator[str]) -> Iterator[tuple[str, bool]]:
    for text in pieces:
        yield text, False
    yield "", True
