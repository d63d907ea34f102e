"""The keys of a record: which were read, and whether ignoring the others changes the training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import one_line
from wgrad.train.options.record_names import (
    CARRYING,
    DETAILS,
    INPUTS,
    LEARNED,
    NAMES,
    NOT_LEARNED,
    SYSTEMS,
    has_form,
)

_WORD = re.compile(r"\w+")
_SHORTEST = 16  # characters of the shortest question for which another text counts as its repetition
_YES_NO = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_OF_THE_QUESTION = "{!r} belongs to the question, and has no place in a record of this form: put it into the prompt"
_OTHER_LOSSES = ("loss", "loss_weight", "loss_scale", "loss_mask")  # on a record these may be measurements


class Keys:
    """A record that keeps track of the keys that were read.

    asked: the texts of its question.
    turns_unread: keys of its turns that are not read.
    for_template: names of variables that only the chat template reads, by the key that gives them.
    """

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.value = dict(value)
        self.asked: list[str] = []
        self.turns_unread: dict[str, None] = {}
        self.for_template: dict[str, str] = {}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.value

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self.value.get(name)

    def take(self, name: str) -> None:
        """Put the keys of the object under this name in its place."""
        self.value |= self.get(name)

    def named(self, names: Iterable[str]) -> str:
        """Return the first of these keys with a value, else the first that exists; "" if none does."""
        there = [name for name in names if name in self.value]
        return next((name for name in there if is_filled(self.value[name])), there[0] if there else "")

    def unread(self, templates: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the keys that were not read. templates: chat templates, which read further keys.

        Raises:
            WgradError: ignoring a key would change the training.
        """
        left = dict[str, None]()
        for name, part in self.value.items():
            if name in self._read or (name in NAMES and not is_filled(part)):
                continue
            if name in CARRYING and not _is_repeated(part, self.asked):
                raise WgradError(
                    f"{_OF_THE_QUESTION.format(name)}, name it with --columns, or leave it out with --columns {name}="
                )
            _check_flag(name, part)
            left[name] = None
        variables = {key: key.partition("[].")[2] for key in self.turns_unread} | self.for_template
        named = [_words(template) for template in templates if variables]
        return (*left, *(key for key, variable in variables.items() if not any(variable in n for n in named)))

    def refuse_in_prompt(self) -> None:
        """Raise WgradError for a system prompt, tools or other parts of the question that were not read."""
        for name in (*SYSTEMS, *INPUTS, "history", "tools", "functions", "documents"):
            part = self.value.get(name)
            if name not in self._read and is_filled(part) and not _is_repeated(part, self.asked):
                raise WgradError(f"{_OF_THE_QUESTION.format(name)}, or rename the key")


@cache
def _words(template: str) -> frozenset[str]:
    return frozenset(_WORD.findall(template))


def is_filled(part: Any) -> bool:
    """Return whether a value is not empty; tables have empty cells for missing keys."""
    return bool(part.strip()) if isinstance(part, str) else part is not None and part != [] and part != {}


def _is_repeated(part: Any, asked: Sequence[str]) -> bool:
    """Return whether a text is part of the question, or contains it."""
    if not isinstance(part, str):
        return False
    text = part.strip()
    return any(text in other or (len(other) >= _SHORTEST and other in text) for other in map(str.strip, asked))


def _check_flag(name: str, part: Any) -> None:
    """Raise WgradError if a key of the whole record excludes it from the loss, or gives it a weight."""
    if name not in (*LEARNED, *NOT_LEARNED) or not is_filled(part):
        return
    if name == "mask" and isinstance(part, str) and part.strip().lower() in ("user", "human"):  # as NeMo writes it
        return
    told = _yes_or_no(part)
    if told is None and name in _OTHER_LOSSES:
        return
    if told is None or told == (name in NOT_LEARNED):
        raise WgradError(
            f"{name!r} is {one_line(repr(part), 40)}, and lines have no weights: remove the line, or leave the key out "
            f"with --columns {name}="
        )


def is_learned(turn: Mapping[str, Any], number: int) -> bool:
    """Return whether a turn of the assistant counts for the loss.

    Raises:
        WgradError: a key asks for a part of the turn, has an unknown value, or asks for a turn of another role.
    """
    learned = True
    is_assistant = turn.get("role") == "assistant"
    for name in (*LEARNED, *NOT_LEARNED):
        part = turn.get(name)
        if not is_filled(part):
            continue
        told = _yes_or_no(part)
        if told is None:
            raise WgradError(
                f"{name!r} of turn {number} must be 0 or 1, true or false; got {one_line(repr(part), 40)}: turns have "
                "no weights between"
            )
        told = told != (name in NOT_LEARNED)
        if told and not is_assistant and name not in NOT_LEARNED:
            raise WgradError(
                f"{name!r} of turn {number} asks for a turn of role {one_line(str(turn.get('role')), 40)!r} to be "
                "trained on, and only those of the assistant are: give --loss-on all, or remove the key"
            )
        learned = learned and told
    for name in DETAILS:
        if is_filled(turn.get(name)):
            raise WgradError(f"{name!r} of turn {number} is not read: give the turn 'train' as true or false")
    return learned


def _yes_or_no(part: Any) -> bool | None:
    """Return a flag as bool; None if it is neither true nor false."""
    if isinstance(part, str):
        return _YES_NO.get(part.strip().lower())
    return bool(part) if isinstance(part, (bool, int, float)) and part in (0, 1) else None


def with_our_names(value: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Rename the keys of a record by --columns. A record that lacks their name may have ours already.

    Raises:
        WgradError: the record lacks a named key, and is not complete without it.
    """
    if not columns:
        return value
    replaced = {ours for ours, theirs in columns.items() if not theirs or theirs in value}
    taken = {theirs for theirs in columns.values() if theirs}
    kept = {key: part for key, part in value.items() if key not in taken and key not in replaced}
    named = kept | {ours: value[theirs] for ours, theirs in columns.items() if theirs and theirs in value}
    lacking = next(((ours, theirs) for ours, theirs in columns.items() if theirs and ours not in named), None)
    if lacking and not has_form(named):
        shown = one_line(", ".join(map(repr, value)) or "none")
        raise WgradError(f"has no {lacking[1]!r}, which --columns gives for {lacking[0]!r}; it has {shown}")
    return named
