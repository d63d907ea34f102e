"""Options of a command as the fields of a frozen dataclass: name, type, default, help and rule in one place.

Command line (`cli_options.py`), YAML files and Python callers all share the same conversion and rules. The option of
field `max_length` is `--max-length`, and its key in a file `max_length` (or `max-length`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.files.input_files import expand_path
from wgrad.train.options.former_names import FORMER, current_name
from wgrad.train.options.option_names import did_you_mean
from wgrad.train.options.option_text import check_text

Rule = tuple[str, Callable[[Any], bool]]
AT_LEAST_1: Rule = ("must be at least 1", lambda v: v >= 1)
ABOVE_0: Rule = ("must be above 0", lambda v: v > 0)
NOT_NEGATIVE: Rule = ("must not be negative", lambda v: v >= 0)
PORT: Rule = ("must be between 0 and 65535", lambda v: 0 <= v <= 65535)
SEED: Rule = ("must be between 0 and 4294967295", lambda v: 0 <= v < 2**32)

_LARGEST = 2**63 - 1  # of 64 bits: what a rule allows beyond would overflow somewhere
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list of names"}


def option(
    default: Any,
    text: str,
    *,
    rule: Rule | None = None,
    choices: Collection[Any] = (),
    metavar: str = "",
    group: str = "",
    path: bool = False,
    json: bool = False,
    required: bool = False,
    fixed: bool = False,
    repeat: bool = False,
    pairs: bool = False,
) -> Any:
    """Return a dataclass field with the metadata that the command line and error messages need.

    Args:
        default: Default value.
        text: Help text.
        rule: Words and a test of the value (None always passes).
        choices: Allowed values.
        metavar: Placeholder for the value in the help.
        group: Title of the group in the help.
        path: Whether the value is a path, in which a leading ~ is expanded.
        json: Whether an object may be given instead of a path, as JSON text or as a mapping.
        required: Whether the command needs it.
        fixed: Whether a resumed run cannot change it, because tensors or the place in the data depend on it.
        repeat: For a tuple: whether each value is a text of its own option; else blanks and commas separate names.
        pairs: As `repeat`, but each value is NAME=VALUE, and a mapping may be given instead.
    """
    repeat = repeat or pairs
    metadata = {k: v for k, v in locals().items() if k not in ("default", "text")} | {"help": text}
    return dataclasses.field(default=default, metadata=metadata)


def _plain(hint: Any) -> Any:
    """Return a type with literals replaced by their type, such as str for Literal["a", "b"]."""
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(_plain, typing.get_args(hint)))
    return hint


def flag(name: str) -> str:
    """Return a field's name as a command line option."""
    return "--" + name.replace("_", "-")


class _TakesFormerNames(type):
    """Lets callers create options by their former names, for one release."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of __init__; without this property, inspect would use that of __call__."""
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        return inspect.Signature(own)

    def __call__(cls, *given: Any, **named: Any) -> Any:
        """Create the options, by current or former names."""
        if FORMER.keys().isdisjoint(named):
            return super().__call__(*given, **named)
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        now = {current_name(name, names): value for name, value in named.items()}
        # If both names of an option are given, the former one is passed on and refused as unknown.
        return super().__call__(*given, **(now if len(now) == len(named) else named))


@dataclass(frozen=True)
class Options(metaclass=_TakesFormerNames):
    """Base class of a command's options. Raises WgradError, naming the option, if a value breaks its rule."""

    hints: ClassVar[dict[str, Any]]  # type of each field

    def __init_subclass__(cls) -> None:
        cls.hints = {name: _plain(hint) for name, hint in typing.get_type_hints(cls).items()}

    def __post_init__(self) -> None:
        valid = _valid_defaults(type(self))
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if given is not field.default or field.name not in valid:
                value = _convert(field, self.hints[field.name], given)
                object.__setattr__(self, field.name, value)
                _check(field, value)

    def require(self, where: str = "") -> None:
        """Raise WgradError if a required option is empty. where: another place to give it."""
        for field in dataclasses.fields(self):
            if field.metadata["required"] and not getattr(self, field.name):
                other = f", or set '{field.name}' {where}" if where else ""
                raise WgradError(f"{flag(field.name)} is required: give it{other}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by field name, in the order of declaration. Tuples become lists."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


@functools.cache
def _valid_defaults(kind: type[Options]) -> frozenset[str]:
    """Return the fields whose default is valid as it is. It is not looked at again: planning copies options thousands
    of times."""

    def is_valid(field: dataclasses.Field[Any]) -> bool:
        try:
            value = _convert(field, kind.hints[field.name], field.default)
            _check(field, value)
        except WgradError:
            return False
        return type(value) is type(field.default) and bool(value == field.default)

    return frozenset(field.name for field in dataclasses.fields(kind) if is_valid(field))


def fixed_options(kind: type[Options]) -> list[dataclasses.Field[Any]]:
    """Return the fields that a resumed run cannot change."""
    return [field for field in dataclasses.fields(kind) if field.metadata["fixed"]]


def field_type(kind: type[Options], name: str) -> type:
    """Return the type of a field, apart from None: bool (also for a switch that takes a number), int, float, str or
    tuple."""
    hint = kind.hints[name]
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    result: type = typing.get_origin(hint) or hint
    return result


def _convert(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Convert a value from the command line, YAML or a caller to the field's type.

    Examples: 1 to 1.0, "2e-4" (which YAML 1.1 reads as text) to a number, a list or "a, b" to a tuple, a Path to text.
    """
    given = value
    is_tuple, is_repeated = typing.get_origin(hint) is tuple, field.metadata["repeat"]
    if isinstance(value, os.PathLike):
        given = value = os.fspath(value)
    if field.metadata["metavar"] == "SIZE" and type(value) is int:
        given = short(value)
    if field.metadata["pairs"] and isinstance(value, Mapping):
        texts = {name: short(part) if part and isinstance(part, int) else part or "" for name, part in value.items()}
        given = tuple(f"{name}={text}" for name, text in texts.items())
    elif field.metadata["json"] and isinstance(value, Mapping):
        given = value = _as_json(value, flag(field.name))
    elif is_repeated and (value is None or isinstance(value, str)):
        given = (value,) if value else ()
    elif is_tuple and isinstance(value, str):
        given = value.replace(",", " ").split()
    try:
        result = _read(given, hint)
        if not all(math.isfinite(v) for v in (result if is_tuple else [result]) if isinstance(v, float)):
            raise msgspec.ValidationError
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter: a byte that is not UTF-8, in a number
        words, example = _expected(field.name, hint, is_tuple, is_repeated)
        raise WgradError(f"{flag(field.name)}: expected {words}, got {short(value)}{example}") from None
    is_path = field.metadata["path"] and not (field.metadata["json"] and is_json(str(result)))
    check = expand_path if is_path else check_text
    if is_repeated and field.metadata["path"] and len(set(result)) < len(result):
        twice = next(v for v in result if result.count(v) > 1)
        raise WgradError(f"{flag(field.name)}: {short(twice)} is given twice: give it once")
    if is_tuple:
        return tuple(dict.fromkeys(check(v, flag(field.name)) if is_repeated else v for v in result))
    if isinstance(result, str):
        return check(result, flag(field.name))
    return result


def is_json(text: str) -> bool:
    """Return whether a text is a JSON object, not a path."""
    return text.lstrip().startswith("{")


def _as_json(value: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise WgradError(f"{name}: cannot be written as JSON ({error}): give what JSON has") from error


def _read(value: Any, hint: Any) -> Any:
    """Convert a value. A text that could stay a word becomes a number or bool if it can."""
    kinds = typing.get_args(hint)
    if isinstance(value, str) and bool in kinds and str in kinds:
        with suppress(msgspec.ValidationError):
            return msgspec.convert(
                value, functools.reduce(operator.or_, (k for k in kinds if k is not str)), strict=False
            )
    return msgspec.convert(value, hint, strict=False)


def _expected(name: str, hint: Any, is_tuple: bool, is_repeated: bool) -> tuple[str, str]:
    """Return words for the expected kind of value, and an example."""
    kinds = (hint, *typing.get_args(hint))
    if is_repeated:
        return "a list of texts", ""
    if is_tuple:
        if float in kinds:
            return "a list of numbers", ": for example 1e-4,3e-4"
        return _WORDS[tuple], f": for example [{'tensorboard, wandb' if name == 'report_to' else 'q_proj, v_proj'}]"
    return ", or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds), ""


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    choices, rule = field.metadata["choices"], field.metadata["rule"]
    if choices and value not in choices and (value is not None or field.default is not None):
        listed, near = ", ".join(map(str, choices)), did_you_mean(short(value).strip("'"), map(str, choices))
        raise WgradError(f"{flag(field.name)}: must be one of {listed}; got {short(value)}{near}")
    if rule and value is not None and not rule[1](value):
        raise WgradError(f"{flag(field.name)}: {rule[0]}; got {show(value)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise WgradError(f"{flag(field.name)}: must be at most {_LARGEST:,}; got {short(value)}")


def show(value: Any) -> str:
    """Return a value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(show, value))
    if isinstance(value, int):
        return short(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
