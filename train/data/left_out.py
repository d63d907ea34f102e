"""The parts of an answer that a chat template removes: thoughts, a reasoning, calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from wgrad.train.data.template_forms import REASONING

_BLOCKS = re.compile(r"(<think>.*?</think>|\[THINK\].*?\[/THINK\])", re.DOTALL)
_FEW = 8  # characters; shorter matches may be chance


def left_out(messages: Iterable[Mapping[str, Any]], said: str, calls: bool = True) -> list[str]:
    """Return the parts of `messages` that are not in the text `said` that the template wrote for them.

    White space is ignored. calls: whether the template may write tool calls.
    """
    squeezed = "".join(said.split())
    lost = []
    for message in messages:
        texts = _BLOCKS.split(_text(message.get("content")))
        texts.append(next((message[key] for key in REASONING if isinstance(message.get(key), str)), ""))
        lost += [piece for text in texts if (piece := _lost(text, squeezed))]
        if any(not calls or name not in said for name in _names(message)):
            lost.append(json.dumps(message.get("tool_calls") or message.get("function_call"), ensure_ascii=False))
    return lost


def _text(content: Any) -> str:
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, str) or (isinstance(part, dict) and "text" in part)]
        return "".join(part if isinstance(part, str) else str(part["text"]) for part in parts)
    return content if isinstance(content, str) else ""


def _names(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that a message calls."""
    calls = message.get("tool_calls")
    calls = [*(calls if isinstance(calls, list) else ()), message.get("function_call")]
    calls = [call for call in calls if isinstance(call, dict)]
    functions = [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]
    return [name for function in functions if isinstance(name := function.get("name"), str)]


def _lost(text: str, said: str) -> str:
    """Return the middle of `text`: without the longest start and end that `said` contains, spaces ignored."""
    places = [place for place, character in enumerate(text) if not character.isspace()]
    squeezed = "".join(text[place] for place in places)
    if squeezed in said:
        return ""
    first = _most(len(squeezed), lambda n: squeezed[:n] in said)
    last = _most(len(squeezed) - first, lambda n: squeezed[len(squeezed) - n :] in said)
    return text[places[first] : places[len(squeezed) - last - 1] + 1]


def _most(count: int, holds: Any) -> int:
    """Return the largest number up to `count` for which `holds` (monotonic) is true; 0 if it is less than _FEW."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low if low >= _FEW else 0
