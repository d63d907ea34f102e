"""A chat template as Ollama's TEMPLATE, in Go's template language.

A chat template is a program, so it is not translated. It is rendered for conversations of marker words; the text
between the markers becomes a Go template, which is then compared with the chat template on other conversations.
Source of Ollama's variables: github.com/ollama/ollama, docs/template.md; `.Messages` includes the system message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from wgrad.device.errors import WgradError
from wgrad.train.data import go_template
from wgrad.train.data.chat import MessagesRefused
from wgrad.train.data.go_template import literal
from wgrad.train.data.template_process import shared_process
from wgrad.train.data.tokenizer import Tokenizer

Messages = list[dict[str, str]]
Render = Callable[[Messages, bool], str]  # messages, add_generation_prompt

_SYSTEM, _QUESTIONS, _ANSWERS = "qzsystem", ("qzaskone", "qzasktwo", "qzaskthree"), ("qzsayone", "qzsaytwo")
_LAST = "{{ $last := eq (len (slice $.Messages $i)) 1 }}"
_FIRST = "or (eq $i 0) (and (eq $i 1) $.System)"


class NotDerivable(Exception):
    """A chat template cannot be expressed in Ollama's language; the message says why."""


@dataclass(frozen=True)
class OllamaTemplate:
    """The TEMPLATE of a Modelfile, and what the user should know about it."""

    text: str
    notes: list[str] = field(default_factory=list)


def ollama_template(tokenizer: Tokenizer) -> OllamaTemplate:
    """Return the TEMPLATE for a tokenizer's chat template; without one, the prompt as it is. Raises WgradError."""
    if not tokenizer.has_chat_template:
        note = "the tokenizer has no chat template, so TEMPLATE passes the prompt as it is"
        return OllamaTemplate("{{ .Prompt }}", [note])
    bos = tokenizer.special_tokens.get("bos_token", "")
    adds_bos = tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.added_ids()[0]
    template = tokenizer.chat_template

    def render(messages: Messages, prompt: bool) -> str:
        text = template.render(messages, prompt)
        return text.removeprefix(bos) if adds_bos else text  # Ollama adds it

    try:
        notes = []
        if adds_bos and not template.render(conversations()[0], True).startswith(bos):
            notes.append(f"Ollama begins each prompt with {bos}, and the chat template does not")
        found = derive(render)
        notes += _kept(found, render)
    except (NotDerivable, MessagesRefused) as error:
        reason = str(error).removesuffix(": move it, or remove it")
        raise WgradError(
            f"export ollama: the chat template has no equal in Ollama's TEMPLATE: {reason}. Give your own with "
            "--template FILE, or use wgrad export llama.cpp, which runs the chat template itself"
        ) from None
    finally:
        shared_process().close()
    if "strftime_now" in tokenizer.template_text:
        notes.append("the chat template writes today's date, and TEMPLATE keeps the date of this export")
    return OllamaTemplate(found.text, notes + found.notes)


def derive(render: Render) -> OllamaTemplate:
    """Return the Go template that renders ten conversations as `render` does. Raises NotDerivable."""
    text, takes_system = _write(render)
    for messages in conversations(takes_system):
        _compare(text, messages, render(messages, True))
        if len(messages) > 2:  # Ollama continues an answer that ends a conversation
            begun, answer = messages[:-1], messages[-2]["content"]
            with suppress(MessagesRefused):
                before, _, _ = render(begun, False).rpartition(answer)
                _compare(text, begun, before + answer)
    notes = [] if takes_system else ["the chat template takes no system message, so TEMPLATE leaves it out"]
    return OllamaTemplate(text, notes)


def _kept(template: OllamaTemplate, render: Render) -> list[str]:
    """Return a note about contents that the chat template changes, which a Go template cannot."""
    question, again = _turn("user", "a"), _turn("user", "c")
    changed = []
    for name, messages in (
        ("blanks around a message", [_turn("user", " a \n"), _turn("assistant", " b \n"), again]),
        ("an empty message", [question, _turn("assistant", ""), again]),
        ("thoughts in earlier answers", [question, _turn("assistant", "<think>\nt\n</think>\n\nb"), again]),
    ):
        with suppress(MessagesRefused):
            if render(messages, True) != render_go(template.text, messages):
                changed.append(name)
    return [f"the chat template changes {', '.join(changed)}; TEMPLATE does not"] if changed else []


def _compare(template: str, messages: Messages, wanted: str) -> None:
    """Compare the text of a Go template for a conversation with the wanted text. Raises NotDerivable."""
    try:
        got = render_go(template, messages)
    except go_template.GoTemplateError as error:
        raise NotDerivable(str(error)) from None
    if got != wanted:
        at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        roles = ", ".join(message["role"] for message in messages)
        raise NotDerivable(
            f"of a conversation of {roles} it writes {wanted[at : at + 30]!r}, not {got[at : at + 30]!r}"
        )


def render_go(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Render a Go template as Ollama does, which joins neighboring messages of one role."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    shown = [
        {"Role": role, "Content": "\n\n".join(message["content"] for message in group)}
        for role, group in groupby(messages, key=itemgetter("role"))
    ]
    return go_template.render(template, {"System": system, "Messages": shown})


def conversations(with_system: bool = False) -> list[Messages]:
    """Ten conversations that end in a question; with_system: half of them begin with a system message."""
    texts = [
        ("Who wrote Emma?", "Jane Austen, in 1815."),
        ("Sum 1 and 2.\nShow your work.", "1 + 2 = 3\n\nSo it is 3."),
        ('Print "a" and {{ b }}', '```python\nprint("a", "{{ b }}")\n```'),
        ("Où est la gare ? 駅はどこ", "À gauche. 左です 🚉"),
        ("<b>bold</b> & [INST]", "user: no, assistant: yes"),
        ("a", "b"),
        ("{% if x %}", "\\n is a line break"),
    ]
    systems = ["Be brief.", 'Answer in "JSON".\n\nNever in XML.', "x", "Ünïcode {{ . }}", "1. One\n2. Two"]
    found = []
    for number in range(10):
        turns = [texts[(number + n) % len(texts)] for n in range(1 + number % 4)]
        messages: Messages = []
        if with_system and number % 2:
            messages.append({"role": "system", "content": systems[number // 2]})
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append(messages[:-1])
    return found


# ---- from marker words to a template ---------------------------------------------------------------------------
def _write(render: Render) -> tuple[str, bool]:
    """Return the Go template, and whether it takes a system message."""
    turns = [_turn("user", _QUESTIONS[0]), _turn("assistant", _ANSWERS[0]), _turn("user", _QUESTIONS[1])]
    turns += [_turn("assistant", _ANSWERS[1]), _turn("user", _QUESTIONS[2])]
    words = [turn["content"] for turn in turns]
    opening, ask, say, *again, close = _between(render(turns, True), words)
    if again != [ask, say]:
        raise NotDerivable("it writes a turn in another way by its place")
    question_end = render(turns[:3], False).partition(words[2])[2]
    answer_end = render(turns[:2], False).partition(words[1])[2]
    if not (ask.startswith(question_end) and close.startswith(question_end)):
        question_end = ""
    if not say.startswith(answer_end):
        answer_end = ""
    to_answer, start, to_question = ask[len(question_end) :], close[len(question_end) :], say[len(answer_end) :]
    to_last = _last_header(render(turns[:2], False), words, question_end, to_answer)
    system = _system(render, turns, words, say)
    # The text before the first question without a system message, and the text after one.
    openings = [opening] + ([system.after] if system and system.place == "first" else [])
    before, header, late = "", literal(to_question), ""
    if all(text.endswith(to_question) for text in openings):  # each question has the same header
        before = _opening(system, [text[: len(text) - len(to_question)] for text in openings], "")
    else:
        header = f"{{{{ if {_FIRST} }}}}{_opening(system, openings, '$')}{{{{ else }}}}{header}{{{{ end }}}}"
    if system and system.place == "last":
        late = f"{literal(system.before)}{{{{ $.System }}}}{literal(system.after)}"
        late = f"{{{{ if and $last $.System }}}}{late}{{{{ end }}}}"
    text = before + "{{ range $i, $_ := .Messages }}" + _LAST
    text += f'{{{{ if eq .Role "user" }}}}{header}{late}{{{{ .Content }}}}{literal(question_end)}'
    text += f"{{{{ if $last }}}}{literal(start)}{{{{ end }}}}" if start else ""
    answer = literal(to_answer)
    if to_last != to_answer:
        answer = f"{{{{ if $last }}}}{literal(to_last)}{{{{ else }}}}{answer}{{{{ end }}}}"
    text += f'{{{{ else if eq .Role "assistant" }}}}{answer}{{{{ .Content }}}}'
    text += f"{{{{ if not $last }}}}{literal(answer_end)}{{{{ end }}}}" if answer_end else ""
    return text + "{{ end }}{{ end }}", system is not None


def _last_header(text: str, words: Sequence[str], question_end: str, to_answer: str) -> str:
    """Return the text before an answer that ends the conversation `text`, which for some models has empty thoughts."""
    before, found, _ = text.partition(words[1])
    _, asked, header = before.partition(words[0] + question_end)
    return header if found and asked else to_answer


def _opening(system: _System | None, heads: Sequence[str], root: str) -> str:
    """Return the template of the text before the first question, including the system message."""
    if system is None or system.place != "first":
        return literal(heads[0])
    with_system = f"{literal(system.before)}{{{{ {root}.System }}}}{literal(heads[1])}"
    return f"{{{{ if {root}.System }}}}{with_system}{{{{ else }}}}{literal(heads[0])}{{{{ end }}}}"


@dataclass(frozen=True)
class _System:
    """Where a system message is: before all ("first") or with the last question ("last"), and the text around it."""

    place: str
    before: str
    after: str


def _system(render: Render, turns: Messages, words: Sequence[str], say: str) -> _System | None:
    """Return the place of the system message; None if the template refuses it or leaves it out.

    say: the text between an answer and a question.
    """
    try:
        text = render([_turn("system", _SYSTEM), *turns], True)
    except MessagesRefused:
        return None
    if _SYSTEM not in text:
        return None
    if text.find(_SYSTEM) < text.find(words[0]):
        before, after, *_ = _between(text, [_SYSTEM, *words])
        return _System("first", before, after)
    *_, before, after, _ = _between(text, [*words[:-1], _SYSTEM, words[-1]])
    if not before.startswith(say):
        raise NotDerivable("it writes the system message in a place of its own")
    return _System("last", before[len(say) :], after)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _between(text: str, words: Sequence[str]) -> list[str]:
    """Return the texts before, between and after marker words. Raises NotDerivable."""
    pieces = []
    for word in words:
        if text.count(word) != 1:
            raise NotDerivable("it leaves out a turn, changes it, or writes it twice")
        piece, _, text = text.partition(word)
        pieces.append(piece)
    return [*pieces, text]


def modelfile(file: str, template: str, stops: Iterable[str], parameters: Sequence[tuple[str, str]]) -> str:
    """Return the text of a Modelfile."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    # A text between `"` and `"` cannot hold one.
    lines += [f'PARAMETER stop """{stop}"""' if '"' in stop else f'PARAMETER stop "{stop}"' for stop in stops]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    return "\n".join(lines) + "\n"
