"""Functions whose keyword arguments are the fields of a command's options, which are written in `options` alone."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from wgrad.device.errors import WgradError
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import Options

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
K = TypeVar("K", bound=Options)
Paths = str | os.PathLike[str]  # as an option that is a path takes them


def takes(kind: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A function of the arguments of `kind`, for type checkers, help() and editors; it runs as it is written."""

    def mark(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = _keywords(kind, function)  # type: ignore[attr-defined]
        return function

    return mark


def takes_beside_one(
    kind: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, T, Q], R]], Callable[Concatenate[S, T, P], R]]:
    """The same of a method whose first argument is no option."""

    def mark(function: Callable[Concatenate[S, T, Q], R]) -> Callable[Concatenate[S, T, P], R]:
        own = list(inspect.signature(function).parameters.values())[:2]
        signature = _keywords(kind, function)
        keywords = signature.parameters.values()
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return mark


def _keywords(kind: Callable[..., Any], function: Callable[..., Any]) -> inspect.Signature:
    given, hints = inspect.signature(kind).parameters.values(), get_type_hints(kind)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in given]
    return inspect.Signature(parameters, return_annotation=function.__annotations__.get("return"))


def make_options(kind: type[K], given: Mapping[str, Any], function: str) -> K:
    """The options of these names and values. WgradError for a name that is none, or a value that breaks its rule."""
    check_names(given, [field.name for field in fields(kind)], function)
    return kind(**given)


def check_names(given: Collection[str], names: Collection[str], function: str) -> None:
    """WgradError for a name that `function` has no argument of."""
    for name in given:
        if name not in names:
            hint = option_hint(name, names, "") or f": see help({function})"
            raise WgradError(f"{function}: unknown argument {name!r}{hint}")
