"""Splitting the text of an answer as it arrives into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wgrad.train.data.thoughts import begins, thought_of_model
from wgrad.train.data.tokenizer import Tokenizer
from wgrad.train.serve.stop_text import overlap
from wgrad.train.serve.tool_calls import PYTHON, Call, ToolFormat, format_of


class Part(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Style:
    """How the answers of a request are written.

    thought: markers around reasoning; begun: text of the answer that the prompt already contains; tools: names of those
    that may be called.
    """

    thought: tuple[str, str] | None = None
    begun: str = ""
    format: ToolFormat | None = None
    tools: Collection[str] = field(default_factory=tuple)

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that are part of the text."""
        found = set(self.thought or ())
        if self.format is not None:
            found |= {self.format.marker or PYTHON, "</tool_call>", "[ARGS]"}
        return frozenset(found)

    def after(self, prompt: str) -> Style:
        """Return the style of the text after a prompt, which may open a thought."""
        if self.thought is None or not begins(self.thought, prompt):
            return self
        return replace(self, begun=self.thought[0])


def style_of(tokenizer: Tokenizer, tools: Collection[str] = ()) -> Style:
    """Return how the answers of a chat model are written. tools: names of those that may be called."""
    form = format_of("\n".join(tokenizer.templates.values())) if tools else None
    return Style(thought_of_model(tokenizer), "", form, tools)


class AnswerParts:
    """Splitter of the text of an answer. Text that may begin a marker is held back; tool calls are returned at the end
    of the answer."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._held, self._place, self._opens = style.begun, "start", False

    def add(self, text: str, *, last: bool) -> Part:
        self._held += text
        reasoning = content = ""
        if self._place == "start":
            self._start(last)
        if self._place == "thought":
            reasoning = self._thought(last)
        if self._place == "content":
            content = self._content(last)
        if self._place == "call" and last:
            calls = self._style.format.calls(self._held, self._style.tools) if self._style.format else None
            if calls is None:
                content += self._held
            return Part(content, reasoning, tuple(calls or ()))
        return Part(content, reasoning)

    def _start(self, last: bool) -> None:
        """Decide whether the answer begins with a thought."""
        thought, text = self._style.thought, self._held.lstrip()
        if thought is not None and text.startswith(thought[0]):
            self._held, self._place, self._opens = text.removeprefix(thought[0]), "thought", True
        elif last or thought is None or not thought[0].startswith(text):
            self._place = "content"

    def _thought(self, last: bool) -> str:
        assert self._style.thought is not None
        end = self._style.thought[1]
        at = self._held.find(end)
        if at < 0:
            return self._take(len(self._held) - (0 if last else overlap(self._held, end)))
        found = self._take(at)
        self._held, self._place, self._opens = self._held.removeprefix(end), "content", True
        return found

    def _content(self, last: bool) -> str:
        form = self._style.format
        if form is None:
            return self._take(len(self._held))
        if not form.marker:  # an answer is a call as a whole, or none
            text = self._held.lstrip()
            if text and (text[0] == "{" or text.startswith(PYTHON)):
                self._place = "call"
                return ""
            if not last and PYTHON.startswith(text):
                return ""
            self._style = Style(self._style.thought)
            return self._take(len(self._held))
        at = self._held.find(form.marker)
        if at >= 0:
            self._place = "call"
            return self._take(at).rstrip("\n")
        sure = len(self._held) - overlap(self._held, form.marker)
        return self._take(len(self._held) if last else len(self._held[:sure].rstrip("\n")))

    def _take(self, count: int) -> str:
        """Take text from the held one, without the newlines at the start of a part."""
        found, self._held = self._held[:count], self._held[count:]
        found = found.lstrip("\n") if self._opens else found
        self._opens = self._opens and not found
        return found
