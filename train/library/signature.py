"""Signatures and docstrings of functions whose keyword arguments are a command's options (train/options)."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from wgrad.device.errors import WgradError
from wgrad.train.options.former_names import current_name, with_current_names
from wgrad.train.options.objectives import OBJECTIVES
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import Options

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
K = TypeVar("K", bound=Options)
Paths = str | os.PathLike[str]  # type of an option that is a path


def takes(kind: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Decorate a function to show the arguments of `kind` to type checkers, help() and editors."""

    def mark(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = _keywords(kind, function)  # type: ignore[attr-defined]
        function.__doc__ = _documented(kind, function)
        return function

    return mark


def takes_beside_one(
    kind: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, T, ...], R]], Callable[Concatenate[S, T, P], R]]:
    """Decorate a method whose first argument is no option; see `takes`."""

    def mark(function: Callable[Concatenate[S, T, ...], R]) -> Callable[Concatenate[S, T, P], R]:
        own = list(inspect.signature(function).parameters.values())[:2]
        signature = _keywords(kind, function)
        keywords = signature.parameters.values()
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        function.__doc__ = _documented(kind, function)
        return function

    return mark


def _keywords(kind: Callable[..., Any], function: Callable[..., Any]) -> inspect.Signature:
    given, hints = inspect.signature(kind).parameters.values(), get_type_hints(kind)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in given]
    return inspect.Signature(parameters, return_annotation=function.__annotations__.get("return"))


def _documented(kind: Any, function: Callable[..., Any]) -> str:
    """Return the docstring with an entry for each option instead of the word OPTIONS."""
    text, marker = inspect.cleandoc(function.__doc__ or ""), "    OPTIONS"
    if marker not in text:
        return text
    entries, names = [], {field.name for field in fields(kind)}
    for field in fields(kind):
        words = next((h for base in kind.__mro__ if (h := _help_of(base, field.name))), "")
        shown = f" Default: {field.default!r}." if field.default not in (None, "", (), MISSING) else ""
        entry = f"{field.name}: {_for_python(words, names)}.{shown}"
        entries += textwrap.wrap(entry, 100, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)
    return text.replace(marker, "\n".join(entries))


def _for_python(words: str, names: Collection[str]) -> str:
    """Return the help of an option as a sentence about arguments: `max_length` for `--max-length`."""

    def renamed(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in names else found[0]

    if "wgrad " not in words:  # it quotes a command
        words = re.sub(r"--([a-z][a-z0-9-]*)", renamed, words)
    first = words.split(" ", 1)[0].rstrip(":,")
    is_name = not re.fullmatch("[a-z-]+", first) or first in OBJECTIVES  # which keeps its spelling
    return words if is_name else words[:1].upper() + words[1:]


def _help_of(kind: Any, name: str) -> str:
    """Return the help of a field in this class, or "" if the class only narrows its type."""
    field = getattr(kind, "__dataclass_fields__", {}).get(name)
    return str(field.metadata.get("help", "")) if field else ""


def make_options(kind: type[K], given: Mapping[str, Any], function: str) -> K:
    """Create options from names and values. WgradError: a name is unknown, or a value breaks its rule."""
    return kind(**checked_names(given, [field.name for field in fields(kind)], function))


def checked_names(given: Mapping[str, Any], names: Collection[str], function: str) -> dict[str, Any]:
    """Return arguments by their current names.

    Args:
        given: Arguments by current or former names.
        names: Names of all arguments.
        function: Name of the function, for errors.

    Raises:
        WgradError: A name is unknown, or an argument is given twice.
    """
    for name in given:
        now = current_name(name, names)
        if now != name:
            if now in given:
                raise WgradError(f"{function}: {name!r} is the former name of {now!r}: give only one of them")
            warnings.warn(f"{function}: {name!r} is now {now!r}", DeprecationWarning, stacklevel=4)
        elif name not in names:
            hint = option_hint(name, names, "") or f": see help({function})"
            raise WgradError(f"{function}: unknown argument {name!r}{hint}")
    return with_current_names(given, names)
