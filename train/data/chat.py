"""Chat templates: rendering conversations into the text that the model sees, and finding the assistant's part of it.

Templates are rendered in a process of their own (`template_process.py`) by the engine of `template_engine.py`.
The behavior follows "Chat templates" in the documentation of transformers (apply_chat_template); the assistant's part
is what TRL's training templates mark (tests/train/test_oracle_chat.py compares).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import commonprefix
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.left_out import left_out
from wgrad.train.data.loop_spans import Shape, Span, end_that_begins, spans_by_loop, whole_tags
from wgrad.train.data.template_forms import REASONING, TemplateForms, in_form, other_part, with_arguments
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.template_spans import THOUGHT, checked_turns, filled_parts

Message = Mapping[str, Any]


class MessagesRefused(WgradError):
    """The template cannot render these messages, but may render others. The error names no file or line."""


@dataclass(frozen=True)
class Conversation:
    """The variables of a template. tools: JSON schemas; options: further variables by name."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rendered:
    """The rendered text and its parts (see `TemplateProcess.render`)."""

    text: str
    messages: list[tuple[int, int, int]] | None = None  # start, end, number of the message
    generated: list[Span] = field(default_factory=list)
    prefixes: dict[int, Span] = field(default_factory=dict)
    unseen: dict[int, list[str]] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[int, list[Span]]:
        """The spans of each message, by its number."""
        found: dict[int, list[Span]] = {}
        for start, end, number in self.messages or ():
            found.setdefault(number, []).append((start, end))
        return found


class ChatTemplate:
    """The templates of a tokenizer.

    Args:
        source: one template, or templates by name: "tool_use" for conversations with tools, "default" for all others.
        special_tokens: the tokens that a template may name, such as {"bos_token": "<s>"}.
        strict: adapt conversations to the template (see `_adapted`), and refuse those with a turn that it leaves out.
            Otherwise render them as transformers does.

    Raises:
        WgradError: the default template does not compile.
    """

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], strict: bool = False
    ) -> None:
        self._strict = strict
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens)
        self._shapes: dict[tuple[str, bool], Shape] = {}
        self._forms: dict[str, TemplateForms] = {}
        shared_process().compile(self._source(None))

    def _source(self, tools: Any) -> str:
        named = self._sources
        if tools is not None and "tool_use" in named:
            return named["tool_use"]
        return named.get("default") or next(iter(named.values()))

    def _ask(
        self, conversation: Conversation, prompt: bool, learn: Sequence[int] | None = None, check: bool = False
    ) -> _Rendered:
        values = {
            **self.special_tokens,
            **conversation.options,
            "messages": [_as_template_sees(m) for m in conversation.messages],
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": prompt,
        }
        try:
            unasked = self._shape(conversation).unasked if learn else ""
            answer = shared_process().render(self._source(conversation.tools), values, learn, check, unasked)
        except RecursionError:
            raise MessagesRefused("the messages are nested too deeply: flatten them") from None
        except TypeError as error:  # of Python or Parquet
            raise MessagesRefused(f"the messages hold what JSON cannot express ({error}): give it as text") from None
        if "failure" in answer:
            line = f" (line {answer['line']} of the template)" if answer["line"] else ""
            verb = "refuses" if answer["failure"] == "refuse" else "fails on"
            raise MessagesRefused(f"the chat template {verb} these messages: {answer['message']}{line}")
        ranges = answer.get("messages")
        return _Rendered(
            answer["text"],
            None if ranges is None else [(start, end, number) for start, end, number in ranges],
            [(start, end) for start, end in answer.get("generated", [])],
            {turn: (start, end) for turn, start, end in answer.get("prefixes", [])},
            {int(number): parts for number, parts in answer.get("unseen", {}).items()},
        )

    def render(self, conversation: Conversation | Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text that the model sees. MessagesRefused: the template refuses messages, or leaves out a turn."""
        if not isinstance(conversation, Conversation):
            conversation = Conversation(conversation)
        return self._render(self._adapted(conversation), add_generation_prompt).text

    def _render(self, conversation: Conversation, prompt: bool, learn: Sequence[int] | None = None) -> _Rendered:
        """Render as `_ask` does; if `strict`, refuse a conversation with a turn that the template leaves out."""
        if not self._strict:
            return self._ask(conversation, prompt, learn)
        forms = self._forms_for(conversation.tools)
        try:
            rendered = self._ask(conversation, prompt, learn, check=True)
        except MessagesRefused as error:
            role = next((m["role"] for m in conversation.messages if not forms.knows(m["role"])), None)
            if role is None or not forms.roles():
                raise
            raise MessagesRefused(f"{error}; it knows the roles {forms.roles()}, not {_shown(role)}") from None
        for number, parts in rendered.unseen.items():
            message = conversation.messages[number]
            if any(part not in parts for part in filled_parts(message)):
                continue  # `left_out` reports it
            what = f"turn {number + 1} (role {_shown(message['role'])})"
            if not forms.knows(message["role"]):
                known = f"the roles {forms.roles()}" if forms.roles() else "no role"
                raise MessagesRefused(
                    f"{what} leaves nothing in what the chat template renders, which knows {known}: "
                    "rename the role, or remove the turn"
                )
            if "content" in parts or "reasoning" in parts:
                raise MessagesRefused(f"the chat template leaves out {what} where it stands: move it, or remove it")
            raise MessagesRefused(
                f"the chat template writes no calls of tools, and {what} has nothing else: remove the line, or give "
                "--chat-template one that does"
            )
        return rendered

    def _forms_for(self, tools: Any) -> TemplateForms:
        source = self._source(tools)
        if source not in self._forms:

            def render(messages: Sequence[Message]) -> str | None:
                try:
                    return self._ask(Conversation(messages, tools), False).text
                except MessagesRefused:
                    return None

            self._forms[source] = TemplateForms(render)
        return self._forms[source]

    def _adapted(self, conversation: Conversation) -> Conversation:
        """Return the conversation in the form that the template takes: contents as text or as parts, arguments of calls
        as objects or as text, `developer` as `system` if it only knows that. MessagesRefused: a part is not text."""
        if not self._strict:
            return conversation
        forms = self._forms_for(conversation.tools)
        messages = []
        for number, message in enumerate(conversation.messages, start=1):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str):
                raise MessagesRefused(f"message {number} has no 'role'")
            if role == "developer" and not forms.knows(role) and forms.knows("system"):
                role = "system"
            if role != "tool" and (what := other_part(content)):
                raise MessagesRefused(f"a part of message {number} {what}: only text can be read: remove the line")
            if isinstance(content, (str, list)) and other_part(content) is None:
                content = in_form(content, forms.contents(role))
            calls = {"tool_calls": with_arguments(c, forms.arguments())} if (c := message.get("tool_calls")) else {}
            messages.append({**message, "role": role, **calls} | ({} if content is None else {"content": content}))
        return Conversation(messages, conversation.tools, conversation.documents, conversation.options)

    def render_with_spans(
        self, conversation: Conversation, learn: Collection[int], lost: list[str] | None = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation and find the spans of the assistant's turns.

        A template with {% generation %} blocks marks them itself. With any other, the conversation is rendered up to
        each turn with the generation prompt, and up to the end of the turn: if both are prefixes of the whole text, the
        turn is the text between. If not (the template writes a turn differently once others follow it), it is the text
        that the template's loop writes while it is at that message, without the generation prompt.

        Args:
            conversation: the messages and further variables.
            learn: numbers of the turns that count for the loss, all of the assistant.
            lost: a list to which the parts of these turns are added that the template removes.

        Returns:
            The text, and the spans of characters of these turns.

        Raises:
            MessagesRefused: none of these ways finds the turns, or the template leaves out a turn.
        """
        turns, conversation = sorted(learn), self._adapted(conversation)
        whole = self._render(conversation, False, turns)
        if not turns:
            return whole.text, []
        found = self._spans(whole, conversation, turns)
        spans = [span for turn, of_turn in found for span in of_turn]
        if lost is not None and spans:
            unwritten = {
                turn for turn, parts in whole.unseen.items() if not {"tool_calls", "function_call"}.isdisjoint(parts)
            }
            for turn in turns:
                # A thought may begin in the prompt.
                places = [span for owner, of_turn in found if owner == turn for span in of_turn]
                said = "\n".join(whole.text[max(start - 2 * len(THOUGHT), 0) : end] for start, end in places)
                lost += left_out([conversation.messages[turn]], said, turn not in unwritten)
        return whole.text, spans

    def _spans(
        self, whole: _Rendered, conversation: Conversation, turns: Sequence[int]
    ) -> list[tuple[int | None, list[Span]]]:
        """Return each of the turns with its spans, in the order of the text."""
        last = len(conversation.messages) - 1
        if whole.generated:
            owned = [(_owner(span[0], whole.messages, last), [span]) for span in whole.generated]
            if whole.messages:
                return [(turn, spans) for turn, spans in owned if turn in turns]
            said = [i for i, m in enumerate(conversation.messages) if m.get("role") == "assistant"]
            if len(said) == len(whole.generated):
                return [(turn, [span]) for turn, span in zip(said, whole.generated) if turn in turns]
        shape = self._shape(conversation)

        def by_loop(turn: int) -> list[Span]:
            if not whole.messages or not shape.is_told:
                return []
            text, behind = whole.text.removesuffix(shape.unasked), whole.messages[-1][1]
            return spans_by_loop(text, whole.places.get(turn, ()), behind, turn == 0, turn == last, shape)

        # In a long conversation only some turns are checked by prefixes; the loop must find the same spans for those.
        checked = set(checked_turns(turns, last + 1))
        is_right = len(checked) == len(turns) or all(by_loop(t) == [s] for t, s in whole.prefixes.items() if t > 0)
        spans: list[tuple[int | None, list[Span]]] = []
        for turn in turns:
            found = [whole.prefixes[turn]] if turn > 0 and turn in whole.prefixes else []
            if not found and (turn in checked or is_right):
                found = by_loop(turn)
            if not found and turn in whole.prefixes:  # a template may write a prompt where there is no turn yet, or not
                found = [whole.prefixes[turn]]
            if not found:
                raise MessagesRefused(
                    f"the chat template renders turn {turn + 1} differently once others follow it, so that what the "
                    "assistant said cannot be told apart: end the conversation there, or give --loss-on all"
                )
            spans.append((turn, found))
        return spans

    def _shape(self, conversation: Conversation) -> Shape:
        """Return how this template writes a turn of the assistant."""
        parts = any(isinstance(m.get("content"), list) for m in conversation.messages)
        key = (self._source(conversation.tools), parts)
        if key not in self._shapes:
            self._shapes[key] = self._find_shape(parts, conversation.tools)
        return self._shapes[key]

    def _find_shape(self, parts: bool, tools: Any) -> Shape:
        """Find the shape of a turn from a short conversation with two answers. The prompt of the last turn may have
        more than those before it (an empty thought), which counts for the loss."""
        bos = self.special_tokens.get("bos_token", "")

        def message(role: str, text: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

        asks = [message("user", f"\u2042What{i}?") for i in range(2)]
        answers = [message("assistant", f"\u2042That{i}.") for i in range(2)]
        try:
            asked = self._ask(Conversation(asks[:1], tools), True, [])
            plain = self._ask(Conversation(asks[:1], tools), False, [])
            once = self._ask(Conversation([asks[0], answers[0]], tools), False, [])
            both = self._ask(Conversation([asks[0], answers[0], asks[1], answers[1]], tools), False, [])
        except MessagesRefused:
            return Shape("", "", bos, True)
        prompt, unasked = _tail(asked), ""
        begun, said = _tail(once), next((both.text[a:b] for a, b in both.places.get(1, ())), "")
        opening = begun.split(THOUGHT)[0].strip()
        if opening and prompt == _tail(plain) == begun and said.lstrip().startswith(opening):
            unasked = begun
        elif not prompt or prompt == _tail(plain):  # written within the loop, if anywhere
            prompt = asked.text[len(commonprefix([asked.text, plain.text])) :]
        is_told, given, answered = True, prompt.split(THOUGHT)[0], []
        for start, end, number in both.messages or []:
            text = both.text[start:end]
            if number in (1, 3):
                answered.append(text)
                prompt = max(commonprefix([prompt, text]), commonprefix([prompt, text.lstrip()]), key=len)
            own = (asks, answers)[number % 2][number // 2]["content"]
            words = own if isinstance(own, str) else own[0]["text"]
            is_told = is_told and text.count("\u2042") == text.count(words) <= 1
        texts = (once.text.removesuffix(unasked), both.text)
        ends = [text.partition("\u2042That0.")[2] for text in texts]
        # A thought counts from its opening tag on, even if the prompt opens it; an incomplete tag belongs to the turn.
        header = whole_tags(prompt.split(THOUGHT)[0]) or end_that_begins(given, answered)
        ended = whole_tags(commonprefix(ends)).rstrip(" ")
        return Shape(header, ended, bos, is_told, unasked)


def _shown(role: str) -> str:
    return ascii(role)[:80]


def _as_template_sees(message: Message) -> dict[str, Any]:
    """Return the message as transformers passes it on: without nulls, its reasoning under every usual name."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _owner(place: int, ranges: list[tuple[int, int, int]] | None, last: int) -> int | None:
    """Return the message that the character at `place` belongs to (after the loop: the last), or None if unknown."""
    if not ranges:
        return None
    if place >= ranges[-1][1]:
        return last
    return next((number for start, end, number in ranges if start <= place < end), None)


def _tail(rendered: _Rendered) -> str:
    """Return the text that the template writes after the loop over the messages."""
    return rendered.text[rendered.messages[-1][1] :] if rendered.messages else ""
