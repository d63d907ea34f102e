"""Conversations, and questions with answers, in the forms of common data sets, as messages of a chat template.

The forms are those of the data sets Alpaca, Dolly, OpenOrca and ShareGPT on the Hugging Face Hub, of OpenAI's
fine-tuning files, and of the documentation of LLaMA-Factory and Axolotl, with the roles that derived data sets use.
"""

from __future__ import annotations

from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.json_text import parse_json_text
from wgrad.train.data.record_keys import Keys, is_filled
from wgrad.train.data.template_forms import REASONING
from wgrad.train.options.record_names import (
    ANSWERS,
    CONVERSATIONS,
    DETAILS,
    INPUTS,
    LEARNED,
    NOT_LEARNED,
    QUESTIONS,
    SYSTEMS,
)

_CALLS = "function_call", "function-call", "tool_call"  # their text is JSON: {"name": ..., "arguments": {...}}
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys(_CALLS, "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function", "function_response", "function-response"), "tool"),
}
# In turns with 'role', a template may have roles of its own; only these are renamed.
_OF_MESSAGES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", **dict.fromkeys(_CALLS, "assistant")}
_OF_A_TURN = {"from", "value", *LEARNED, *NOT_LEARNED, *DETAILS}
# The keys that are read of turns with 'role', besides those that the template names.
_OF_A_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", *REASONING}
_OF_A_MESSAGE |= {*LEARNED, *NOT_LEARNED, *DETAILS}


def conversation_form(keys: Keys) -> tuple[str, list[dict[str, Any]] | None]:
    """Return the name of a record's form ("" if it needs no note), and its messages, or None if it has none.

    Raises:
        WgradError: a part of the wrong type, an unknown role, or a history, whose turns nothing marks for the loss.
    """
    if "messages" in keys:
        return "", with_system(turns_of(keys.get("messages"), "messages", keys), keys)
    if "prompt" in keys and "completion" in keys:
        return "", None
    if keys.named(QUESTIONS) and keys.named(ANSWERS):
        return _question_and_answer(keys)
    if name := keys.named(CONVERSATIONS):
        return "ShareGPT", with_system(turns_of(keys.get(name), name, keys), keys)
    return "", None


def type_name(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number") if value != [] else "an empty list"


# ---- question and answer -----------------------------------------------------------------------
def _question_and_answer(keys: Keys) -> tuple[str, list[dict[str, Any]]]:
    question, name = keys.named(QUESTIONS), keys.named(ANSWERS)
    form = "Alpaca" if (question, name) == ("instruction", "output") else f"{question!r} and {name!r}"
    asked = question_turns(keys)
    answer = _text(keys.get(name), name)
    if not answer:
        raise WgradError(f"{name!r} is empty: fill it, or remove the line")
    return form, [*asked, {"role": "assistant", "content": answer}]


def question_turns(keys: Keys) -> list[dict[str, Any]]:
    """Return the turns of the system and the user. The input follows the question after an empty line."""
    if is_filled(keys.get("history")):
        raise WgradError("'history' of an Alpaca record is not read: give the conversation as 'messages'")
    question, more = keys.named(QUESTIONS), keys.named(INPUTS)
    parts = [_text(keys.get(question), question), _text(_filled(keys.get(more)), more) if more else ""]
    asked = "\n\n".join(part for part in parts if part)
    if not asked:
        raise WgradError(f"{question!r} is empty: fill it, or remove the line")
    return with_system([{"role": "user", "content": asked}], keys)


def _filled(part: Any) -> Any:
    """Return an optional text, "" for null (an empty cell of a table)."""
    return "" if part is None else part


def with_system(turns: list[dict[str, Any]], keys: Keys) -> list[dict[str, Any]]:
    """Put the record's system prompt before its turns, and note the texts that are not the assistant's in `keys.asked`.

    Raises:
        WgradError: the turns begin with another system prompt.
    """
    name = keys.named(SYSTEMS)
    text = _text(_filled(keys.get(name)), name) if name else ""
    first = turns[0] if turns else {}
    if text.strip() and first.get("role") in ("system", "developer"):
        if str(first.get("content")).strip() != text.strip():
            raise WgradError(f"{name!r} and the first turn are system prompts that differ: keep one of the two")
    elif text.strip():
        turns = [{"role": "system", "content": text}, *turns]
    asked = (turn.get("content") for turn in turns if turn.get("role") != "assistant")
    keys.asked += [content for content in asked if isinstance(content, str)]
    return turns


# ---- turns -------------------------------------------------------------------------------------
def turns_of(value: Any, name: str, keys: Keys) -> list[dict[str, Any]]:
    """Return the messages of a list of turns with 'role' and 'content', or 'from' and 'value'.

    Raises:
        WgradError: it is not such a list.
    """
    what = "messages" if name in ("messages", "prompt", "completion", "chosen", "rejected") else "turns"
    if isinstance(value, str) and name in ("messages", *CONVERSATIONS) and value.lstrip().startswith("["):
        value = parse_json_text(value, repr(name))  # tables and some files have it so
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = _rows(value)
    if not isinstance(value, list) or not value:
        raise WgradError(f"{name!r} must be a list of {what} that is not empty; got {type_name(value)}")
    return [_message(turn, number, name, keys) for number, turn in enumerate(value, start=1)]


def _rows(columns: dict[str, Any]) -> Any:
    """Return the turns of an object of lists, as the package datasets saves a `Sequence` of objects; otherwise it."""
    parts = list(columns.values())
    if not all(isinstance(part, list) and len(part) == len(parts[0]) for part in parts):
        return columns
    return [dict(zip(columns, turn)) for turn in zip(*parts)]


def _message(turn: Any, number: int, name: str, keys: Keys) -> dict[str, Any]:
    if isinstance(turn, dict) and isinstance(turn.get("role"), str):
        role = _plain_role(turn["role"])
        turn = {**turn, "role": role}
        keys.turns_unread |= {
            f"{name}[].{key}": None for key, part in turn.items() if key not in _OF_A_MESSAGE and is_filled(part)
        }
        if role in _CALLS:
            return {**turn, "role": "assistant", "content": "", "tool_calls": _calls(turn.get("content"), number)}
        call = turn.get("function_call")
        if is_filled(call) and not turn.get("tool_calls"):  # of OpenAI's older files
            rest = {key: part for key, part in turn.items() if key != "function_call"}
            return {**rest, "tool_calls": _calls(call, number)}
        return {**turn, "role": _OF_MESSAGES[role]} if role in _OF_MESSAGES else turn
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        if name in ("conversations", "conversation"):
            raise WgradError(f"{name!r}: turn {number} must be an object with 'from' and 'value'")
        raise WgradError(f"{name!r}: message {number} must be an object with 'role' and 'content'")
    if (role := _plain_role(turn["from"])) not in _ROLES:
        raise WgradError(
            f"'from' of turn {number} must be one of {', '.join(_ROLES)}; got {ascii(role)[:80]}: "
            "rename it, or give 'messages'"
        )
    message = {key: part for key, part in turn.items() if key in _OF_A_TURN and key not in ("from", "value")}
    keys.turns_unread |= dict.fromkeys(f"{name}[].{key}" for key in turn if key not in _OF_A_TURN)
    if role in _CALLS:
        return {**message, "role": "assistant", "content": "", "tool_calls": _calls(turn.get("value"), number)}
    return {**message, "role": _ROLES[role], "content": _text(turn.get("value"), f"value of turn {number}")}


def _plain_role(role: str) -> str:
    """Return a known role without capitals and spaces around it, such as `assistant` for `Assistant`; others as is."""
    plain = role.strip().lower()
    return plain if plain in _ROLES else role


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """Return the tool calls of a turn: one call or a list of them, as objects or as JSON text."""
    where = f"the function call of turn {number}"
    if isinstance(value, str):
        value = parse_json_text(value, where)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise WgradError(f"{where} is an empty list: name a function, or remove the turn")
    return [{"type": "function", "function": _function(call, where)} for call in calls]


def _function(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise WgradError(f"{where} must be an object with 'name' and 'arguments'; got {type_name(call)}")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_json_text(arguments, f"'arguments' of {where}") if arguments.strip() else {}
    if not isinstance(arguments, (dict, type(None))):
        raise WgradError(f"'arguments' of {where} must be an object; got {type_name(arguments)}")
    return {"name": call["name"], "arguments": arguments or {}}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {type_name(value)}")
    return value
