"""The spans of the trained turns in a rendered conversation, and the turns that a template leaves out.

Runs in the process of `template_process.py`, since it renders a conversation several times.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wgrad.train.data.template_engine import CompiledTemplate, TemplateFailure
from wgrad.train.data.template_forms import REASONING

THOUGHT, CLOSED = "<think>", "</think>"

_CHECKED = 64  # most turns of a conversation that get renderings of their own
_RENDERED = 4000  # most messages in all of these, each of which includes all turns before
_LONG = 12  # characters; a shorter text is easily found in another place
_RETRIED = 8  # most turns that are tried one by one

Message = Mapping[str, Any]
_Attempt = Callable[[Sequence[Message], bool], str | None]


def _attempt(template: CompiledTemplate, values: Mapping[str, Any]) -> _Attempt:
    """Return a function that renders other messages with the same values, or returns None if the template fails."""

    def attempt(messages: Sequence[Message], prompt: bool) -> str | None:
        try:
            return template.render({**values, "messages": list(messages), "add_generation_prompt": prompt})
        except TemplateFailure:
            return None

    return attempt


# ---- the rule of prefixes ------------------------------------------------------------------------
def checked_turns(turns: Sequence[int], messages: int) -> list[int]:
    """Return the turns to check with `prefix_spans`: all, or in a long conversation the first, the last and some
    between. messages: number of messages of the conversation."""
    most = min(_CHECKED, max(_RENDERED // max(messages, 1), 2))
    if len(turns) <= most:
        return list(turns)
    return sorted({turns[round(i * (len(turns) - 1) / (most - 1))] for i in range(most)})


def prefix_spans(
    template: CompiledTemplate, values: Mapping[str, Any], text: str, learn: Iterable[int], unasked: str = ""
) -> dict[int, tuple[int, int]]:
    """Return the spans of the turns for which the text up to the turn with the generation prompt, and the text up to
    its end, are both prefixes of the whole `text`. unasked: see `TemplateProcess.render`; it belongs to no turn."""
    messages, attempt = values["messages"], _attempt(template, values)
    found: dict[int, tuple[int, int]] = {}
    for turn in learn:
        before = attempt(messages[:turn], True)
        after = text if turn == len(messages) - 1 else attempt(messages[: turn + 1], False)
        if before is None or after is None or not text.startswith(after := after.removesuffix(unasked)):
            continue
        if THOUGHT in before[-200:]:
            # A thought counts from its opening tag on, even if the prompt opens it.
            place = _opened_thought(attempt, messages[:turn], before, unasked)
            if place >= 0 and not (text.startswith(before) and CLOSED not in after[place:]):
                before = before[:place]
        end = len(after.rstrip(" "))  # without the spaces before the next turn
        if text.startswith(before) and len(before) < end:
            found[turn] = (len(before), end)
    return found


def _opened_thought(attempt: _Attempt, messages: Sequence[Message], before: str, unasked: str) -> int:
    """Return the place at which the generation prompt at the end of `before` opens a thought, or -1."""
    plain = attempt(messages, False)
    if plain is None:
        return -1
    plain = plain.removesuffix(unasked)
    start = len(os.path.commonprefix([before, plain]))
    if start < len(plain):
        # Without the prompt, the template writes the messages differently, and a tag may be theirs. The prompt is
        # within the end that remains if every message says more.
        other = attempt([_longer(message) for message in messages], True)
        if other is None:
            return -1
        same = len(os.path.commonprefix([before[::-1], other[::-1]]))
        start = max(start, len(before) - same)
    return before.find(THOUGHT, start)


def _longer(message: Message) -> Message:
    """Return the message with a letter added to each of its parts."""
    for part in filled_parts(message):
        message = _altered(message, part, "*x")
    return message


# ---- turns that are left out ----------------------------------------------------------------------


def unseen_parts(template: CompiledTemplate, values: Mapping[str, Any], text: str) -> dict[int, list[str]]:
    """Return the parts ("content", "reasoning", "tool_calls") that leave nothing in the text, by number of the message.

    Each part gets a word of its own, which must appear in the text. A message without content is tried with some.
    """
    messages = values["messages"]
    parts = [filled_parts(message) for message in messages]
    if len(messages) <= _CHECKED and all(_stands_in(text, template, messages, n, p) for n, p in enumerate(parts)):
        return {}
    known = json.dumps(values, ensure_ascii=False) + template.source + text
    stem = next(name for i in range(10**6) if (name := f"qz{i}w") not in known.lower())

    def word(number: int, part: str) -> str:
        return f"{stem}{number}{part[0]}q"

    def altered(number: int, part: str, form: str) -> dict[str, Any]:
        return _altered(messages[number], part, form.replace("@", word(number, part)))

    attempt, prompt = _attempt(template, values), values["add_generation_prompt"]
    marked = []
    for number, message in enumerate(messages):
        for part in parts[number]:
            message = _altered(message, part, f"*{word(number, part)}")
        marked.append(message)
    rendered = attempt(marked, prompt)
    shown = set(re.findall(rf"{stem}\d+[a-z]q", (rendered or "").lower()))
    missing = {n: [p for p in of_one if word(n, p) not in shown] for n, of_one in enumerate(parts)}
    for number in [n for n, of_one in missing.items() if "tool_calls" in of_one][:_RETRIED]:
        calls = _readdressed(messages[number]["tool_calls"], word(number, "id"))
        other = attempt(
            [*messages[:number], {**messages[number], "tool_calls": calls}, *messages[number + 1 :]], prompt
        )
        if other is not None and other != text:  # it writes a call's id instead of its name
            missing[number].remove("tool_calls")
    missing = {n: of_one for n, of_one in missing.items() if of_one}
    retried = 0
    for number, of_one in list(missing.items()):
        if len(of_one) < len(parts[number]):
            if rendered is None:
                del missing[number]
            continue
        # Nothing of the turn is there: try each part alone, in several forms.
        seen = retried >= _RETRIED
        retried += 1
        for part in [] if seen else of_one:
            for form in ("*@", "@*", "@"):
                other = attempt([*messages[:number], altered(number, part, form), *messages[number + 1 :]], prompt)
                seen = seen or (other is not None and other != text)
            if seen:
                break
        if seen:
            del missing[number]
        else:
            return {number: of_one}
    return missing


def filled_parts(message: Message) -> list[str]:
    """Return the parts of a message that are not empty, or ["content"] if all are empty."""
    content = message.get("content")
    parts = ["content"] if content and not (isinstance(content, str) and not content.strip()) else []
    parts += ["reasoning"] if any(isinstance(message.get(k), str) and message[k].strip() for k in REASONING) else []
    parts += [k for k in ("tool_calls", "function_call") if message.get(k) and _renamed(message[k], "*x") is not None]
    return parts or ["content"]


def _stands_in(
    text: str, template: CompiledTemplate, messages: Sequence[Message], number: int, parts: list[str]
) -> bool:
    """Return whether the content of a message is literally in the text, so that nothing need be tried."""
    content = messages[number].get("content")
    if parts != ["content"] or not isinstance(content, str) or len(wanted := content.strip()) < _LONG:
        return False
    others = sum(_text_of(m).count(wanted) for m in messages)
    return wanted not in template.source and text.count(wanted) >= others


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(message, ensure_ascii=False)


def _altered(message: Message, part: str, form: str) -> dict[str, Any]:
    """Return the message with a part changed. form: the new text, in which "*" stands for the old one."""
    changed = dict(message)
    if part == "content":
        changed["content"] = _content_altered(message.get("content"), form)
    elif part == "reasoning":
        for key in REASONING:
            if isinstance(text := message.get(key), str):
                changed[key] = form.replace("*", text)
    else:
        changed[part] = _renamed(message[part], form)
    return changed


def _content_altered(content: Any, form: str) -> Any:
    if isinstance(content, list):
        for place in range(len(content) - 1, -1, -1):
            item = content[place]
            if isinstance(item, dict) and isinstance(item.get("text"), str):
                item = {**item, "text": form.replace("*", item["text"])}
            elif isinstance(item, str):
                item = form.replace("*", item)
            else:
                continue
            return [*content[:place], item, *content[place + 1 :]]
        return [*content, {"type": "text", "text": form.replace("*", "")}]
    return form.replace("*", content if isinstance(content, str) else "")


def _renamed(calls: Any, form: str) -> Any:
    """Return tool calls with changed names; None if one has no name."""
    if isinstance(calls, list):
        renamed = [_renamed(call, form) for call in calls]
        return None if None in renamed else renamed
    if isinstance(calls, dict) and isinstance(inner := calls.get("function"), dict):
        changed = _renamed(inner, form)
        return None if changed is None else {**calls, "function": changed}
    if isinstance(calls, dict) and isinstance(name := calls.get("name"), str):
        return {**calls, "name": form.replace("*", name)}
    return None


def _readdressed(calls: Any, id_: str) -> Any:
    """Return tool calls with another id."""
    listed = calls if isinstance(calls, list) else [calls]
    return [{**call, "id": id_} if isinstance(call, dict) and "id" in call else call for call in listed]
