"""Chat templates: Jinja as Hugging Face tokenizers carry it, rendered in a sandbox, and which part the assistant said.

Source of the behaviour: "Chat templates" in the documentation of transformers (apply_chat_template).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wgrad.autograd.errors import WgradError

Message = Mapping[str, Any]
Span = tuple[int, int]  # characters [start, end) of the rendered text

# Private-use characters around what a {% generation %} block renders; taken out again before anyone sees the text.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} around what the assistant says, as transformers defines it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """A compiled template. special_tokens: what the template may name, such as {"bos_token": "<s>"}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise WgradError(f"--model: the tokenizer's chat template does not compile: {error}") from error

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise WgradError(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # the template's own code, on odd messages
            raise WgradError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Messages as the model sees them. WgradError, without file or line, where the template refuses them."""
        return self._render(messages, add_generation_prompt).replace(_OPEN, "").replace(_CLOSE, "")

    def render_with_spans(self, messages: Sequence[Message], learn: Sequence[int]) -> tuple[str, list[Span]]:
        """-> the text, and the characters that the messages numbered in `learn` (assistant turns) stand for.

        A template with {% generation %} blocks says so itself. For any other the text is rendered up to each turn, with
        the generation prompt, and up to its end: both must be prefixes of the whole, else WgradError.
        """
        marked = self._render(messages, False)
        assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        if _OPEN in marked:
            text, spans = _unmark(marked)
            if len(spans) == len(assistants):
                return text, [span for i, span in zip(assistants, spans) if i in learn]
        text = marked.replace(_OPEN, "").replace(_CLOSE, "")
        return text, [self._span_of(text, messages, i) for i in learn]

    def _span_of(self, text: str, messages: Sequence[Message], turn: int) -> Span:
        before = self.render(messages[:turn], add_generation_prompt=True)
        after = self.render(messages[: turn + 1])
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise WgradError(
                f"the chat template renders turn {turn + 1} differently once others follow it, so that what the "
                "assistant said cannot be told apart: end the conversation there, or give --loss-on all"
            )
        return len(before), len(after)


def _unmark(marked: str) -> tuple[str, list[Span]]:
    text, spans, start = "", [], 0
    for piece in marked.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
        # Pieces: outside, inside, _CLOSE + outside, inside, ...
        if piece.startswith(_CLOSE):
            spans.append((start, len(text)))
            piece = piece[1:]
        start = len(text)
        text += piece
    return text, spans
