"""Chat templates: conversations as the model sees them, and which part of that the assistant says.

Templates are rendered in a process of their own (`template_process.py`) by the engine of `template_engine.py`.
Source of the behaviour: "Chat templates" in the documentation of transformers (apply_chat_template); which part counts
is what TRL's training templates mark (tests/train/test_oracle_chat.py compares).
"""

from __future__ import annotations

import os.path
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.template_process import shared_process

Message = Mapping[str, Any]
Span = tuple[int, int]  # characters [start, end) of the rendered text

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, the first the usual one


class MessagesRefused(WgradError):
    """The template cannot render these messages; it may well render others. The message names no file or line."""


@dataclass(frozen=True)
class Conversation:
    """What a template is given. tools: JSON schemas; options: further names that the template knows."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rendered:
    """text, and the ranges of it that are told apart (see `template_engine.py`)."""

    text: str
    messages: list[tuple[int, int, int]] | None  # start, end, number of the message
    generated: list[Span]


class ChatTemplate:
    """The templates of a tokenizer. special_tokens: what a template may name, such as {"bos_token": "<s>"}.

    source: one template, or templates by name, of which "tool_use" is for conversations with tools and "default" for
    all others. WgradError where the default one does not compile.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens)
        self._headers: dict[tuple[str, bool], str] = {}
        shared_process().compile(self._source(None))

    def _source(self, tools: Any) -> str:
        named = self._sources
        if tools is not None and "tool_use" in named:
            return named["tool_use"]
        return named.get("default") or next(iter(named.values()))

    def _ask(self, conversation: Conversation, prompt: bool, marked: bool) -> _Rendered:
        values = {
            **self.special_tokens,
            **conversation.options,
            "messages": [_as_template_sees(m) for m in conversation.messages],
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": prompt,
        }
        try:
            answer = shared_process().render(self._source(conversation.tools), values, marked)
        except RecursionError:
            raise MessagesRefused("the messages are nested too deeply: flatten them") from None
        except TypeError as error:  # of Python or Parquet
            raise MessagesRefused(f"the messages hold what JSON has not ({error}): give it as text") from None
        if "failure" in answer:
            line = f" (line {answer['line']} of the template)" if answer["line"] else ""
            verb = "refuses" if answer["failure"] == "refuse" else "fails on"
            raise MessagesRefused(f"the chat template {verb} these messages: {answer['message']}{line}")
        ranges, generated = answer.get("messages"), answer.get("generated", [])
        messages = None if ranges is None else [(start, end, number) for start, end, number in ranges]
        return _Rendered(answer["text"], messages, [(start, end) for start, end in generated])

    def render(self, conversation: Conversation | Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Messages as the model sees them. MessagesRefused where the template refuses them."""
        if not isinstance(conversation, Conversation):
            conversation = Conversation(conversation)
        return self._ask(conversation, add_generation_prompt, marked=False).text

    def render_with_spans(self, conversation: Conversation, learn: Collection[int]) -> tuple[str, list[Span]]:
        """-> the text, and the characters that the messages numbered in `learn` (assistant turns) stand for.

        A template with {% generation %} blocks says so itself. For any other, a turn is what the template's loop writes
        while it is at that message, without what a generation prompt gives, without spaces that part it from the
        next turn, and for the last message with what follows the loop (an eos token). Where a template has no such
        loop, the text is rendered up to each turn and up to its end; both must be prefixes of the whole.
        MessagesRefused where none of this tells the turns apart.
        """
        whole = self._ask(conversation, prompt=False, marked=True)
        last = len(conversation.messages) - 1
        if whole.generated:
            spans = [s for s in whole.generated if _owner(s[0], whole.messages, last) in learn]
            if whole.messages:
                return whole.text, spans
            said = [i for i, m in enumerate(conversation.messages) if m.get("role") == "assistant"]
            if len(said) == len(whole.generated):
                return whole.text, [span for turn, span in zip(said, whole.generated) if turn in learn]
        if whole.messages:
            header, bos = self._header(conversation), self.special_tokens.get("bos_token", "")
            turns = [_turn_spans(whole, turn, turn == last, header, bos) for turn in sorted(learn)]
            return whole.text, [span for spans in turns for span in spans]
        return whole.text, [self._span_by_prefixes(whole.text, conversation, turn) for turn in sorted(learn)]

    def _span_by_prefixes(self, text: str, conversation: Conversation, turn: int) -> Span:
        def part(messages: Sequence[Message], prompt: bool) -> str:
            shorter = Conversation(messages, conversation.tools, conversation.documents, conversation.options)
            return self._ask(shorter, prompt, marked=False).text

        before = part(conversation.messages[:turn], True)
        after = part(conversation.messages[: turn + 1], False)
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise MessagesRefused(
                f"the chat template renders turn {turn + 1} differently once others follow it, so that what the "
                "assistant said cannot be told apart: end the conversation there, or give --loss-on all"
            )
        return len(before), len(after)

    def _header(self, conversation: Conversation) -> str:
        """What every turn of the assistant begins with and a generation prompt gives: never to be learnt.

        Seen in a short conversation with two of them: a template may give more in the prompt for the last turn only
        (an empty thought), which then counts where it is rendered.
        """
        parts = any(isinstance(m.get("content"), list) for m in conversation.messages)
        key = (self._source(conversation.tools), parts)
        if key not in self._headers:
            self._headers[key] = self._find_header(parts, conversation.tools)
        return self._headers[key]

    def _find_header(self, parts: bool, tools: Any) -> str:
        def message(role: str, text: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

        question, answer = message("user", "What?"), message("assistant", "\u2042That.")
        try:
            asked = self._ask(Conversation([question], tools), prompt=True, marked=True)
            plain = self._ask(Conversation([question], tools), prompt=False, marked=True)
            both = self._ask(Conversation([question, answer, question, answer], tools), prompt=False, marked=True)
        except MessagesRefused:
            return ""
        prompt = _tail(asked)
        if not prompt or prompt == _tail(plain):  # written within the loop, if anywhere
            prompt = asked.text[len(_common(asked.text, plain.text)) :]
        for start, end, number in both.messages or []:
            if number in (1, 3):
                prompt = _common(prompt, both.text[start:end].lstrip())
        return prompt.split("<think>")[0]  # a thought counts from its opening tag on, whoever opens it


def _as_template_sees(message: Message) -> dict[str, Any]:
    """As transformers hands a message on: keys of null are left out, a reasoning is there under its usual names."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _owner(place: int, ranges: list[tuple[int, int, int]] | None, last: int) -> int | None:
    """The message that the character at `place` belongs to: the last one behind the loop; None: not known."""
    if not ranges:
        return None
    if place >= ranges[-1][1]:
        return last
    return next((number for start, end, number in ranges if start <= place < end), None)


def _turn_spans(whole: _Rendered, turn: int, is_last: bool, header: str, bos: str) -> list[Span]:
    """Where the turn numbered `turn` is said; empty where the template leaves it out."""
    assert whole.messages is not None
    spans = [(start, end) for start, end, number in whole.messages if number == turn]
    if not spans:
        return []
    start, end = spans[0]
    spans[0] = (start + _given(whole.text[start:end], turn == 0, header, bos), end)
    start, end = spans[-1]
    behind = whole.messages[-1][1]
    if is_last and end == behind and whole.text[behind:].strip():
        end = len(whole.text)
    said = whole.text[start:end].rstrip(" ")
    spans[-1] = (start, start + len(said))
    return [(a, b) for a, b in spans if a < b]


def _given(text: str, opens: bool, header: str, bos: str) -> int:
    """How many characters at the beginning of a turn are not said by the assistant. opens: the turn is the first, and
    what the template writes before all turns (bos, a system prompt of its own) may be part of it."""
    if header and opens and header in text:
        return text.index(header) + len(header)
    blanks = len(text) - len(text.lstrip())
    for place in (0, blanks):
        for wanted in (header, header.rstrip()):  # a turn may have nothing behind the header, not even its newline
            if wanted and text.startswith(wanted, place):
                return place + len(wanted)
    return len(bos) if opens and bos and text.startswith(bos) else 0


def _tail(rendered: _Rendered) -> str:
    """What is written behind the loop over the messages."""
    return rendered.text[rendered.messages[-1][1] :] if rendered.messages else ""


def _common(a: str, b: str) -> str:
    """The longest common prefix."""
    return os.path.commonprefix([a, b])
