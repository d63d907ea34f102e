"""Metadata of a GGUF file, key by key, with checked types.

Source: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, show
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.files.gguf_traits import traits_of

Kind = TypeVar("Kind", str, int, float, bool)
_NAMES: dict[type, str] = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class GgufFields:
    """The keys of one file. source: the option that named it, which begins each error."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self._values = {entry.key: entry.value for entry in read_metadata(path, source)}
        self.architecture = self.get("general.architecture", str, "")
        self.traits = traits_of(self.architecture)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @overload
    def get(self, key: str, kind: type[Kind]) -> Kind | None: ...
    @overload
    def get(self, key: str, kind: type[Kind], default: Kind) -> Kind: ...
    def get(self, key: str, kind: type[Kind], default: Kind | None = None) -> Kind | None:
        """Return the value of a key, or `default` if it is missing. Raises WgradError if it is not of the kind."""
        value = self._values.get(key)
        if value is None:
            return default
        if kind is str and isinstance(value, bytes):
            return kind(self._text(key, value))
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (kind is not bool and isinstance(value, bool)):
            shown = value.decode(errors="replace") if isinstance(value, bytes) else value
            raise self.error(key, f"must be {_NAMES[kind]}, got {show(shown)}")
        return kind(_shortest(value) if isinstance(value, float) else value)

    def needed(self, key: str, kind: type[Kind]) -> Kind:
        """Return the value of a key. Raises WgradError if it is missing or not of the kind."""
        value = self.get(key, kind)
        if value is None:
            raise self.error(key, f"must be {_NAMES[kind]}, got none")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; [] if the key is missing."""
        return [self._text(key, value) for value in self._list(key, bytes, "texts")]

    def is_list(self, key: str) -> bool:
        """Return whether a key has several values."""
        return isinstance(self._values.get(key), list)

    def numbers(self, key: str) -> list[Any]:
        """Return a list of numbers; [] if the key is missing."""
        return self._list(key, (int, float), "numbers")

    def whole_numbers(self, key: str) -> list[int]:
        """Return a list of whole numbers, as which booleans count; [] if the key is missing."""
        return [int(value) for value in self._list(key, int, "whole numbers")]

    def _list(self, key: str, kind: Any, name: str) -> list[Any]:
        values = self._values.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.error(key, f"must be a list of {name}")
        return values

    def _text(self, key: str, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise self.error(key, f"must be UTF-8, got {show(repr(value[:40]))}") from error

    def error(self, key: str, problem: str) -> WgradError:
        return WgradError(f"{self.source}: {self.path}: {key} {problem}: {FETCH}")


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32, such as 0.2, which is the value that was meant."""
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value
