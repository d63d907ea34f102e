"""Decoding the JSON text of a record with bounded memory.

Python's objects take up to 100 times the memory of their text: `{},` becomes 72 bytes. Records are mostly text and have
few values; one with very many is refused before it is decoded.
"""

from __future__ import annotations

import json
import re
from typing import Any

from wgrad.device.errors import WgradError

MOST_VALUES = 500_000  # in a record; as objects with one key each, they take some 120 MiB
_SIGNS = b"[{,:"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def decode_json_text(data: bytes) -> Any:
    """Decode JSON text in UTF-8. Raises ValueError (UnicodeDecodeError, json.JSONDecodeError) or RecursionError."""
    if len(data) > MOST_VALUES and _values(data) > MOST_VALUES and _values(_STRING.sub(b"", data)) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values in one record")
    return json.loads(data.decode("utf-8"))


def _values(data: bytes) -> int:
    return sum(data.count(sign) for sign in _SIGNS)


def parse_json_text(text: str, name: str) -> Any:
    """Decode JSON that a record has as text. Raises WgradError, which begins with `name`."""
    try:
        return decode_json_text(text.encode())
    except (ValueError, RecursionError) as error:
        raise WgradError(f"{name} is text that is not valid JSON: {error}") from error
