"""Show functions that take a command's options as `help()` does: with every argument, not with `**given`.

mkdocstrings reads the sources, where the decorators of train/library/signature.py have not run.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Takes signature and docstring from the imported function, where it has a signature of its own."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        if "given" not in func.parameters:
            return
        found: Any = importlib.import_module(func.module.path)
        for name in func.path.removeprefix(f"{func.module.path}.").split("."):
            found = getattr(found, name)
        if not hasattr(found, "__signature__"):
            return
        shown = list(inspect.signature(found).parameters.values())
        func.parameters = griffe.Parameters(*map(_parameter, shown))
        func.docstring = griffe.Docstring(inspect.getdoc(found) or "", parser=griffe.Parser.google, parent=func)


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    empty = inspect.Parameter.empty
    annotation = None if given.annotation is empty else _words(given.annotation)
    default = None if given.default is empty else repr(given.default)
    kind = griffe.ParameterKind(given.kind.description)
    return griffe.Parameter(given.name, annotation=annotation, kind=kind, default=default)


def _words(annotation: Any) -> str:
    words = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for module in ("collections.abc.", "typing.", "os."):
        words = words.replace(module, "")
    return words
