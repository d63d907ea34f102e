"""Records of Alpaca and of ShareGPT as the messages that they stand for.

Source of the forms: the data sets of those names on the Hugging Face hub; roles that their descendants added are known.
"""

from __future__ import annotations

from typing import Any

from wgrad.device.errors import WgradError

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def as_messages(value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """-> "Alpaca" or "ShareGPT" and the record with 'messages'; "" and the record itself where it is neither.

    WgradError: a part of the wrong type, an unknown role, a history (of which nothing says what is to be learnt).
    """
    if "messages" in value or ("prompt" in value and "completion" in value):
        return "", value
    if "instruction" in value and "output" in value:
        return "Alpaca", value | {"messages": _alpaca(value)}
    if "conversations" in value:
        return "ShareGPT", value | {"messages": _sharegpt(value)}
    return "", value


def type_name(value: Any) -> str:
    """What a value is, in words of JSON."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number") if value != [] else "an empty list"


def _filled(part: Any) -> Any:
    """A part that may be missing: null is no text, as it is in a table."""
    return "" if part is None else part


def _alpaca(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The input stands below the instruction, an empty line between."""
    if value.get("history"):
        raise WgradError("'history' of an Alpaca record is not read: give the conversation as 'messages'")
    parts = [_text(value["instruction"], "instruction"), _text(_filled(value.get("input")), "input")]
    asked = "\n\n".join(part for part in parts if part)
    if not asked:
        raise WgradError("'instruction' is empty: fill it, or remove the line")
    answer = _text(value["output"], "output")
    if not answer:
        raise WgradError("'output' is empty: fill it, or remove the line")
    return [*_system(value), {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _sharegpt(value: dict[str, Any]) -> list[dict[str, Any]]:
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise WgradError(f"'conversations' must be a list of turns that is not empty; got {type_name(turns)}")
    messages = _system(value)
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):  # messages already
        return messages + turns
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(role := turn.get("from"), str):
            raise WgradError(f"'conversations': turn {number} must be an object with 'from' and 'value'")
        if role not in _ROLES:
            raise WgradError(
                f"'from' of turn {number} must be one of {', '.join(_ROLES)}; got {ascii(role)[:80]}: "
                "rename it, or give 'messages'"
            )
        messages.append({"role": _ROLES[role], "content": _text(turn.get("value"), f"value of turn {number}")})
    return messages


def _system(value: dict[str, Any]) -> list[dict[str, Any]]:
    text = _text(_filled(value.get("system")), "system")
    return [{"role": "system", "content": text}] if text else []


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WgradError(f"{name!r} must be text; got {type_name(value)}")
    return value
