"""A record of a data file -> the text that it stands for, and which part of it is to be learnt.

The record is one of
    {"text": "..."}                                every token counts
    {"prompt": "...", "completion": "..."}         the completion counts
    {"messages": [{"role": ..., "content": ...}]}  what the assistant says counts; the tokenizer's chat template is used
    {"instruction": "...", "output": "..."}        Alpaca, with "input" and "system" where there are: taken for messages
    {"conversations": [{"from": ..., "value": ...}]}  ShareGPT, with "system": taken for messages
and prompt and completion may themselves be lists of messages. Beside messages, "tools" (a list of JSON schemas, or that
list as text), "documents" and "chat_template_kwargs" reach the template, as they do in TRL and transformers. What
objectives other than sft learn from is in `preferences.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.chat import REASONING, Conversation, MessagesRefused, Span
from wgrad.train.data.conversation_forms import as_messages, type_name
from wgrad.train.data.records import has_form
from wgrad.train.data.tokenizer import Tokenizer, check_text


class BadLine(WgradError):
    """A line that cannot be learnt from; others can. The message begins with file and line."""


@dataclass(frozen=True)
class Sample:
    """A line as text: characters in `spans` are to be learnt. `whole`: bos and eos are the tokenizer's business here
    (not the template's). form: what to say of the record's form, "" where nothing. label: `Document`'s. more: the next
    sample is of the same record, and neither is of use without the other. framed: the tokens begin with bos and end with
    eos, which are added where the text has none (ORPO)."""

    text: str
    spans: list[Span]
    whole: bool
    line: int
    form: str = ""
    label: int = 0
    more: bool = False
    framed: bool = False


def parse_record(record: bytes | dict[str, Any], name: str, line: int, loss_on: str, tokenizer: Tokenizer) -> Sample:
    """The sample of a record, decoded or JSON text that is not blank. BadLine; WgradError where no record with messages
    could be used."""
    with of_line(name, line):
        form, value = as_messages(without_null_columns(parse_object(record)))
        form = f"{form} records: made conversations of the chat template" if form else ""
        text, spans, whole = _text_and_spans(value, loss_on, tokenizer)
        check_text(text)
        return Sample(text, spans, whole, line, form)


@contextmanager
def of_line(name: str, line: int) -> Iterator[None]:
    """What goes wrong within is a BadLine of this place; an option's error stays as it is."""
    try:
        yield
    except WgradError as error:
        if str(error).startswith("--"):
            raise
        raise BadLine(f"{name}:{line}: {error}") from error


def parse_prompt(
    data: bytes | dict[str, Any], name: str, line: int, chat: bool, tokenizer: Tokenizer
) -> tuple[dict[str, Any], str, bool]:
    """A line, or its object, with "prompt" or "messages" -> that object, the text to go on from, `whole` (see Sample).

    chat: a prompt that is text is a user's message. BadLine; WgradError where no line with messages could be used.
    """
    with of_line(name, line):
        value = parse_object(data) if isinstance(data, bytes) else data
        text, whole = _prompt_text(value, chat, tokenizer)
        check_text(text)
        return value, text, whole


def _prompt_text(value: dict[str, Any], chat: bool, tokenizer: Tokenizer) -> tuple[str, bool]:
    if "messages" in value:
        turns = messages_of(value["messages"], "messages")
    elif isinstance(value.get("prompt"), list):
        turns = messages_of(value["prompt"], "prompt")
    elif "prompt" in value:
        text = text_of(value["prompt"], "prompt")
        if not chat:
            return text, True
        turns = [{"role": "user", "content": text}]
    else:
        raise WgradError(f"needs 'prompt' or 'messages'; it has {keys_of(value)}")
    return tokenizer.chat_template.render(conversation_of(turns, value), add_generation_prompt=True), False


def parse_object(data: bytes | dict[str, Any]) -> dict[str, Any]:
    """A record as an object. WgradError where its text is none."""
    if isinstance(data, dict):
        return data
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise WgradError(f"not UTF-8 (byte 0x{data[error.start]:02x}): convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise WgradError(f"not valid JSON: {error.msg} at column {error.colno}: expected one object") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, nesting without end
        raise WgradError(f"not valid JSON: {error}: expected one object") from error
    if not isinstance(value, dict):
        raise WgradError(f"expected a JSON object, got {type_name(value)}")
    return value


def without_null_columns(value: dict[str, Any]) -> dict[str, Any]:
    """A record without nulls, where a form is complete without them: tables of several forms put together have null in
    the columns of the others."""
    filled = {key: part for key, part in value.items() if part is not None}
    return filled if len(filled) < len(value) and has_form(filled) else value


def label_of(value: dict[str, Any]) -> bool | None:
    """A record's label, which tables have as text or as 0 and 1; None where it has none that is true or false."""
    label = value.get("label")
    if isinstance(label, str):
        return {"true": True, "false": False, "1": True, "0": False}.get(label.strip().lower())
    return bool(label) if isinstance(label, (bool, int)) and label in (0, 1) else None


def keys_of(value: dict[str, Any]) -> str:
    """Those of a record, for a message."""
    return (", ".join(map(repr, value)) or "none")[:200]


def _text_and_spans(value: dict[str, Any], loss_on: str, tokenizer: Tokenizer) -> tuple[str, list[Span], bool]:
    """-> text, spans to be learnt, `whole` (see Sample)."""
    if "messages" in value:
        return _chat(messages_of(value["messages"], "messages"), 0, value, loss_on, tokenizer)
    if "prompt" in value and "completion" in value:
        if label_of(value) is not None:
            raise WgradError(
                "'label' beside 'prompt' and 'completion' says whether the completion is any good, and --objective sft "
                "would learn all alike: give --objective kto, or remove the label"
            )
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = messages_of(prompt, "prompt")
            return _chat(before + messages_of(completion, "completion"), len(before), value, loss_on, tokenizer)
        prompt = text_of(prompt, "prompt", may_be_empty=True)
        text = prompt + text_of(completion, "completion")
        return text, [(0 if loss_on == "all" else len(prompt), len(text))], True
    if "text" in value:
        text = text_of(value["text"], "text")
        return text, [(0, len(text))], True
    if "chosen" in value and "rejected" in value:
        raise WgradError("'chosen' and 'rejected' are a preference: give --objective dpo, orpo or kto")
    raise WgradError(
        "needs 'text', 'prompt' and 'completion', 'messages', 'instruction' and 'output', or "
        f"'conversations'; it has {keys_of(value)}"
    )


def _chat(
    turns: list[dict], first: int, value: dict[str, Any], loss_on: str, tokenizer: Tokenizer
) -> tuple[str, list[Span], bool]:
    """first: number of the first turn that may count; value: the line, with what else the template is given."""
    conversation = conversation_of(turns, value)
    if loss_on == "all":
        text = tokenizer.chat_template.render(conversation)
        return text, [(0, len(text))], False
    learn = {i for i, turn in enumerate(turns) if i >= first and turn["role"] == "assistant"}
    if not learn:
        raise WgradError("no turn of the assistant, so nothing to learn: add one, or give --loss-on all")
    text, spans = tokenizer.chat_template.render_with_spans(conversation, learn)
    if not spans:
        raise MessagesRefused("the chat template leaves out what the assistant says: nothing to learn: remove the line")
    return text, spans, False


def conversation_of(turns: list[dict], value: dict[str, Any]) -> Conversation:
    options = value.get("chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise WgradError(f"'chat_template_kwargs' must be an object; got {type_name(options)}")
    tools, documents = _objects(value.get("tools"), "tools"), _objects(value.get("documents"), "documents")
    return Conversation(turns, tools, documents, options or {})


def _objects(value: Any, name: str) -> list[dict] | None:
    """A list of objects, or that list as JSON text; None where there is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise WgradError(f"{name!r} is text that is not valid JSON: {error}: give a list of objects") from error
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise WgradError(f"{name!r} must be a list of objects; got {type_name(value)}")
    return value


def messages_of(value: Any, name: str) -> list[dict]:
    if not isinstance(value, list) or not value:
        raise WgradError(f"{name!r} must be a list of messages that is not empty; got {type_name(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WgradError(f"{name!r}: message {number} must be an object with 'role' and 'content'")
        content = message.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise WgradError(f"'content of message {number}' must be text; got {type_name(content)}")
        says_more = any(message.get(key) for key in ("tool_calls", *REASONING))
        if content is None and "content" not in message and not says_more:
            raise WgradError(f"'content of message {number}' must be text; got nothing")
        if message["role"] == "assistant" and not content and not says_more:
            raise WgradError(f"'content of message {number}' is empty: fill it, or remove the line")
    return value


def text_of(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {type_name(value)}")
    if not value and not may_be_empty:
        raise WgradError(f"{name!r} is empty: fill it, or remove the line")
    return value
