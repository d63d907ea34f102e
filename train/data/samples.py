"""Records of a data file: their text, and which parts of it count for the loss.

A record is one of
    {"text": "..."}                                every token counts
    {"prompt": "...", "completion": "..."}         the completion counts
    {"messages": [{"role": ..., "content": ...}]}  the assistant's turns count; rendered by the chat template
    {"instruction": "...", "output": "..."}        Alpaca, optionally with "input"; becomes messages
    {"conversations": [{"from": ..., "value": ...}]}  ShareGPT; becomes messages
and prompt and completion may themselves be lists of messages; `record_names.py` has further names of these keys. With
messages, "system" becomes the first one, and "tools" (a list of JSON schemas, or that list as text), "documents" and
"chat_template_kwargs" are passed to the template, as in TRL and transformers. A turn with "weight": 0, "train": false
or "loss": false does not count. `preferences.py` has the records of objectives other than sft.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from wgrad.device.errors import WgradError
from wgrad.train.data.chat import Conversation, MessagesRefused
from wgrad.train.data.conversation_forms import conversation_form, turns_of, type_name, with_system
from wgrad.train.data.json_text import decode_json_text, parse_json_text
from wgrad.train.data.left_out import left_out
from wgrad.train.data.loop_spans import Span
from wgrad.train.data.record_keys import Keys, is_learned
from wgrad.train.data.template_forms import REASONING
from wgrad.train.data.tokenizer import Tokenizer, check_text
from wgrad.train.options.objectives import objectives_with
from wgrad.train.options.record_names import LABELS, has_form


class BadLine(WgradError):
    """A line cannot be used, but others can. The error begins with file and line."""


class Sample(msgspec.Struct, frozen=True):
    """The text of a line.

    spans: the characters that count for the loss.
    whole: the tokenizer adds bos and eos (not the template).
    form: the name of the record's form, for a note; "" if it needs none.
    label: as in `Document`.
    more: the next sample is of the same record, and both are used together.
    framed: the tokens begin with bos and end with eos, which are added if the text lacks them (ORPO).
    unread: keys of the record that are not read.
    turns: for a conversation, each turn's role and whether it counts for the loss.
    lost: the parts of the trained turns that the template removes.
    """

    text: str
    spans: list[Span]
    whole: bool
    line: int
    form: str = ""
    label: int = 0
    more: bool = False
    framed: bool = False
    unread: tuple[str, ...] = ()
    turns: tuple[tuple[str, bool], ...] = ()
    lost: tuple[str, ...] = ()


def parse_record(record: bytes | dict[str, Any], name: str, line: int, loss_on: str, tokenizer: Tokenizer) -> Sample:
    """Return the sample of a record, an object or JSON text that is not blank.

    Raises:
        BadLine: the record cannot be used.
        WgradError: no record with messages can be used.
    """
    with of_line(name, line):
        keys = Keys(without_null_columns(parse_object(record)))
        form, turns = conversation_form(keys)
        form = f"{form} records: made conversations of the chat template" if form else ""
        if turns is None:
            sample = _plain_sample(keys, loss_on, tokenizer)
        else:
            # A number may be that of a class, and says nothing about the answer.
            refuse_label(keys, LABELS if isinstance(keys.value.get("label"), bool) else ("kto_tag",))
            sample = _chat(turns, 0, keys, loss_on, tokenizer)
        check_text(sample.text)
        return msgspec.structs.replace(sample, line=line, form=form, unread=keys.unread(tokenizer.templates.values()))


@contextmanager
def of_line(name: str, line: int) -> Iterator[None]:
    """Turn errors within the block into a BadLine of this line, except those of an option."""
    try:
        yield
    except WgradError as error:
        if str(error).startswith("--"):
            raise
        raise BadLine(f"{name}:{line}: {error}") from error


def parse_prompt(
    data: bytes | dict[str, Any], name: str, line: int, chat: bool, tokenizer: Tokenizer
) -> tuple[dict[str, Any], str, bool]:
    """Return the object of a line with "prompt" or "messages", the text of the prompt, and `whole` (see Sample).

    chat: treat a prompt that is text as a user's message.

    Raises:
        BadLine: the line cannot be used.
        WgradError: no line with messages can be used.
    """
    with of_line(name, line):
        value = parse_object(data) if isinstance(data, bytes) else data
        text, whole = _prompt_text(value, chat, tokenizer)
        check_text(text)
        return value, text, whole


def _prompt_text(value: dict[str, Any], chat: bool, tokenizer: Tokenizer) -> tuple[str, bool]:
    keys = Keys(value)
    if "messages" in value:
        turns = messages_of(value["messages"], "messages", keys)
    elif isinstance(value.get("prompt"), list):
        turns = messages_of(value["prompt"], "prompt", keys)
    elif "prompt" in value:
        text = text_of(value["prompt"], "prompt")
        if not chat:
            keys.asked.append(text)
            keys.refuse_in_prompt()
            return text, True
        turns = [{"role": "user", "content": text}]
    else:
        raise WgradError(f"needs 'prompt' or 'messages'; it has {keys_of(value)}")
    conversation = conversation_of(with_system(turns, keys), keys)
    keys.refuse_in_prompt()
    return tokenizer.chat_template.render(conversation, add_generation_prompt=True), False


def parse_object(data: bytes | dict[str, Any]) -> dict[str, Any]:
    """Return a record as an object. Raises WgradError if its text is not one."""
    if isinstance(data, dict):
        return data
    try:
        value = decode_json_text(data)
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
    """Remove the nulls of a record if it is complete without them, since concatenated tables of several forms have null
    in the columns of the other forms."""
    filled = {key: part for key, part in value.items() if part is not None}
    return filled if len(filled) < len(value) and has_form(filled) else value


_ZERO_ONE = {"1": True, "0": False, "1.0": True, "0.0": False}  # of a column with gaps pandas makes floats


def label_of(label: Any) -> bool | None:
    """Return a record's label, which tables may have as text or as 0 and 1; None if it is neither true nor false."""
    if isinstance(label, str):
        return {"true": True, "false": False}.get(label.strip().lower(), _ZERO_ONE.get(label.strip()))
    return bool(label) if isinstance(label, (bool, int, float)) and label in (0, 1) else None


def refuse_label(keys: Keys, names: tuple[str, ...] = LABELS) -> None:
    """Raise WgradError if one of these keys rates the answer."""
    for name in names:
        if label_of(keys.value.get(name)) is not None:
            raise WgradError(
                f"{name!r} says whether the answer is any good, and --objective sft would learn all alike: give "
                f"--objective {objectives_with('labels')}, or leave it out with --columns {name}="
            )


def keys_of(value: Mapping[str, Any]) -> str:
    """List the keys of a record, for an error."""
    return (", ".join(map(repr, value)) or "none")[:200]


def _plain_sample(keys: Keys, loss_on: str, tokenizer: Tokenizer) -> Sample:
    """Return the sample of a record that is not a conversation; the caller sets its line."""
    if "prompt" in keys and "completion" in keys:
        refuse_label(keys)
        prompt, completion = keys.get("prompt"), keys.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            before = with_system(messages_of(prompt, "prompt", keys), keys)
            return _chat(before + messages_of(completion, "completion", keys), len(before), keys, loss_on, tokenizer)
        prompt = text_of(prompt, "prompt", may_be_empty=True)
        text = prompt + text_of(completion, "completion")
        keys.asked.append(prompt)
        return Sample(text, [(0 if loss_on == "all" else len(prompt), len(text))], True, 0)
    if "text" in keys:
        text = text_of(keys.get("text"), "text")
        keys.asked.append(text)
        return Sample(text, [(0, len(text))], True, 0)
    if "chosen" in keys and "rejected" in keys:
        raise WgradError(
            f"'chosen' and 'rejected' are a preference: give --objective {objectives_with('pairs', 'labels')}"
        )
    raise WgradError(
        "needs 'text', 'prompt' and 'completion', 'messages', 'instruction' and 'output', or "
        f"'conversations'; it has {keys_of(keys.value)}"
    )


def _chat(turns: list[dict[str, Any]], first: int, keys: Keys, loss_on: str, tokenizer: Tokenizer) -> Sample:
    """Return the sample of a conversation; the caller sets its line.

    first: index of the first turn that may count for the loss; keys: the record, with further template variables.
    """
    check_messages(turns)
    conversation = conversation_of(turns, keys)
    if loss_on == "all":
        return _all_but_skipped(turns, conversation, tokenizer)
    told = [is_learned(turn, number) for number, turn in enumerate(turns, start=1)]
    said = [i for i, turn in enumerate(turns) if i >= first and turn["role"] == "assistant"]
    if not said:
        raise WgradError("no turn of the assistant, so nothing to learn: add one, or give --loss-on all")
    learn = {i for i in said if told[i]}
    if not learn:
        raise WgradError("every turn of the assistant says that it is not trained on: remove the line")
    lost: list[str] = []
    text, spans = tokenizer.chat_template.render_with_spans(conversation, learn, lost)
    if not spans:
        raise MessagesRefused("the chat template leaves out what the assistant says: nothing to learn: remove the line")
    return Sample(text, spans, False, 0, turns=_roles(turns, learn), lost=tuple(lost))


def _roles(turns: list[dict[str, Any]], learn: Collection[int]) -> tuple[tuple[str, bool], ...]:
    """Return each turn's role, and whether it counts for the loss."""
    return tuple((turn["role"], number in learn) for number, turn in enumerate(turns))


def _all_but_skipped(turns: list[dict[str, Any]], conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    """Return the sample for --loss-on all: the whole text but the assistant's turns that are excluded by a key."""
    skipped = {i for i, turn in enumerate(turns) if turn["role"] == "assistant" and not is_learned(turn, i + 1)}
    roles = _roles(turns, set(range(len(turns))) - skipped)
    text, spans = tokenizer.chat_template.render_with_spans(conversation, skipped)
    edges = [0, *(place for span in sorted(spans) for place in span), len(text)]
    spans = [(start, end) for start, end in zip(edges[::2], edges[1::2]) if start < end]
    lost = left_out([turn for turn, (role, is_kept) in zip(turns, roles) if is_kept and role == "assistant"], text)
    return Sample(text, spans, False, 0, turns=roles, lost=tuple(lost))


def conversation_of(turns: list[dict[str, Any]], keys: Keys) -> Conversation:
    options = keys.get("chat_template_kwargs")
    if options is not None and not isinstance(options, dict):
        raise WgradError(f"'chat_template_kwargs' must be an object; got {type_name(options)}")
    tools, documents = _objects(keys.get("tools"), "tools"), _objects(keys.get("documents"), "documents")
    functions = _objects(keys.get("functions"), "functions")  # of OpenAI's older files
    if tools is None and functions is not None:
        tools = [{"type": "function", "function": function} for function in functions]
    given = {"tools": tools, "functions": functions, "documents": documents}
    keys.for_template |= {key: key.replace("functions", "tools") for key, part in given.items() if part and key in keys}
    keys.for_template |= {f"chat_template_kwargs.{name}": name for name in options or {}}
    return Conversation(turns, tools, documents, options or {})


def _objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return a list of objects, given as such or as JSON text; None if it is missing."""
    if isinstance(value, str):
        value = parse_json_text(value, repr(name)) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise WgradError(f"{name!r} must be a list of objects; got {type_name(value)}")
    return value


def messages_of(value: Any, name: str, keys: Keys) -> list[dict[str, Any]]:
    """Return the checked messages of a part of a record. Raises WgradError."""
    turns = turns_of(value, name, keys)
    check_messages(turns)
    return turns


def check_messages(turns: list[dict[str, Any]]) -> None:
    """Raise WgradError if a message has no content, or one of the wrong type."""
    for number, message in enumerate(turns, start=1):
        content = message.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise WgradError(f"'content of message {number}' must be text; got {type_name(content)}")
        says_more = any(message.get(key) for key in ("tool_calls", *REASONING))
        if content is None and "content" not in message and not says_more:
            raise WgradError(f"'content of message {number}' must be text; got nothing")
        if message["role"] == "assistant" and not content and not says_more:
            raise WgradError(f"'content of message {number}' is empty: fill it, or remove the line")


def text_of(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {type_name(value)}")
    if not value and not may_be_empty:
        raise WgradError(f"{name!r} is empty: fill it, or remove the line")
    return value
