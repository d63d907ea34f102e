"""Functions whose keyword arguments are the fields of a command's options, which are written in `options` alone."""

from __future__ import annotations

import inspect
import os
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from wgrad.device.errors import WgradError
from wgrad.train.options.former_names import current_name, with_current_names
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import Options, show

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
K = TypeVar("K", bound=Options)
Paths = str | os.PathLike[str]  # as an option that is a path takes them


def takes(kind: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A function of the arguments of `kind`, for type checkers, help() and editors; it runs as it is written."""

    def mark(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = _keywords(kind, function)  # type: ignore[attr-defined]
        function.__doc__ = _documented(kind, function)
        return function

    return mark


def takes_beside_one(
    kind: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, T, ...], R]], Callable[Concatenate[S, T, P], R]]:
    """The same of a method whose first argument is no option."""

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
    """Return the docstring with an entry per option in place of the word OPTIONS."""
    text, marker = inspect.cleandoc(function.__doc__ or ""), "    OPTIONS"
    if marker not in text:
        return text
    entries = []
    for field in fields(kind):
        words = next((h for base in kind.__mro__ if (h := _help_of(base, field.name))), "")
        shown = f" Default: {show(field.default)}." if field.default not in (None, "", ()) else ""
        entry = f"{field.name}: {words[:1].upper()}{words[1:]}.{shown}"
        entries += textwrap.wrap(entry, 100, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False)
    return text.replace(marker, "\n".join(entries))


def _help_of(kind: Any, name: str) -> str:
    """Return the help of a field as this class has it, or "": a subclass may narrow a type alone."""
    field = getattr(kind, "__dataclass_fields__", {}).get(name)
    return str(field.metadata.get("help", "")) if field else ""


def make_options(kind: type[K], given: Mapping[str, Any], function: str) -> K:
    """The options of these names and values. WgradError for a name that is none, or a value that breaks its rule."""
    return kind(**checked_names(given, [field.name for field in fields(kind)], function))


def checked_names(given: Mapping[str, Any], names: Collection[str], function: str) -> dict[str, Any]:
    """Return the arguments by the names that they have today.

    Raises:
        WgradError: `function` has no argument of a name, or one is given twice.
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
