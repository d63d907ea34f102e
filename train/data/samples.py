"""A record of a data file -> the text that it stands for, and which part of it is to be learnt.

The record is one of
    {"text": "..."}                                every token counts
    {"prompt": "...", "completion": "..."}         the completion counts
    {"messages": [{"role": ..., "content": ...}]}  what the assistant says counts; the tokenizer's chat template is used
    {"instruction": "...", "output": "..."}        Alpaca, with "input" and "system" where there are: taken for messages
    {"conversations": [{"from": ..., "value": ...}]}  ShareGPT, with "system": taken for messages
and prompt and completion may themselves be lists of messages. Beside messages, "tools" (a list of JSON schemas, or that
list as text), "documents" and "chat_template_kwargs" reach the template, as they do in TRL and transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.chat import REASONING, Conversation, MessagesRefused, Span
from wgrad.train.data.conversation_forms import as_messages, type_name
from wgrad.train.data.tokenizer import Tokenizer, check_text


class BadLine(WgradError):
    """A line that cannot be learnt from; others can. The message begins with file and line."""


@dataclass(frozen=True)
class Sample:
    """A line as text: characters in `spans` are to be learnt. `whole`: bos and eos are the tokenizer's business here
    (not the template's). form: Alpaca or ShareGPT where the record was made messages; "" of any other."""

    text: str
    spans: list[Span]
    whole: bool
    line: int
    form: str = ""


def parse_record(record: bytes | dict[str, Any], name: str, line: int, loss_on: str, tokenizer: Tokenizer) -> Sample:
    """The sample of a record, decoded or JSON text that is not blank. BadLine; WgradError where no record with messages
    could be used."""
    try:
        value = _parse_object(record) if isinstance(record, bytes) else record
        form, value = as_messages(value)
        text, spans, whole = _text_and_spans(value, loss_on, tokenizer)
        check_text(text)
        return Sample(text, spans, whole, line, form)
    except WgradError as error:
        if str(error).startswith("--"):
            raise
        raise BadLine(f"{name}:{line}: {error}") from error


def parse_prompt(
    data: bytes, name: str, line: int, chat: bool, tokenizer: Tokenizer
) -> tuple[dict[str, Any], str, bool]:
    """A line with "prompt" or "messages" -> its object, the text to go on from, `whole` (see Sample).

    chat: a prompt that is text is a user's message. BadLine; WgradError where no line with messages could be used.
    """
    try:
        value = _parse_object(data)
        text, whole = _prompt_text(value, chat, tokenizer)
        check_text(text)
        return value, text, whole
    except WgradError as error:
        if str(error).startswith("--"):
            raise
        raise BadLine(f"{name}:{line}: {error}") from error


def _prompt_text(value: dict[str, Any], chat: bool, tokenizer: Tokenizer) -> tuple[str, bool]:
    if "messages" in value:
        turns = _messages(value["messages"], "messages")
    elif isinstance(value.get("prompt"), list):
        turns = _messages(value["prompt"], "prompt")
    elif "prompt" in value:
        text = _text(value["prompt"], "prompt")
        if not chat:
            return text, True
        turns = [{"role": "user", "content": text}]
    else:
        keys = ", ".join(map(repr, value)) or "none"
        raise WgradError(f"needs 'prompt' or 'messages'; it has {keys[:200]}")
    return tokenizer.chat_template.render(_conversation(turns, value), add_generation_prompt=True), False


def _parse_object(data: bytes) -> dict[str, Any]:
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


def _text_and_spans(value: dict[str, Any], loss_on: str, tokenizer: Tokenizer) -> tuple[str, list[Span], bool]:
    """-> text, spans to be learnt, `whole` (see Sample)."""
    if "messages" in value:
        return _chat(_messages(value["messages"], "messages"), 0, value, loss_on, tokenizer)
    if "prompt" in value and "completion" in value:
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _messages(prompt, "prompt")
            return _chat(before + _messages(completion, "completion"), len(before), value, loss_on, tokenizer)
        prompt = _text(prompt, "prompt", may_be_empty=True)
        text = prompt + _text(completion, "completion")
        return text, [(0 if loss_on == "all" else len(prompt), len(text))], True
    if "text" in value:
        text = _text(value["text"], "text")
        return text, [(0, len(text))], True
    keys = ", ".join(map(repr, value)) or "none"
    raise WgradError(
        "needs 'text', 'prompt' and 'completion', 'messages', 'instruction' and 'output', or "
        f"'conversations'; it has {keys[:200]}"
    )


def _chat(
    turns: list[dict], first: int, value: dict[str, Any], loss_on: str, tokenizer: Tokenizer
) -> tuple[str, list[Span], bool]:
    """first: number of the first turn that may count; value: the line, with what else the template is given."""
    conversation = _conversation(turns, value)
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


def _conversation(turns: list[dict], value: dict[str, Any]) -> Conversation:
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


def _messages(value: Any, name: str) -> list[dict]:
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


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {type_name(value)}")
    if not value and not may_be_empty:
        raise WgradError(f"{name!r} is empty: fill it, or remove the line")
    return value
