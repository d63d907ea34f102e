"""JSON text of a record, of which no more is made than its memory is worth.

Python's objects take up to 100 times the text that they are read from: `{},` becomes 72 bytes. A record is text, so it
has few values for its length; one of very many is refused before they are made.
"""

from __future__ import annotations

import json
import re
from typing import Any

from wgrad.device.errors import WgradError

MOST_VALUES = 500_000  # of a record; of objects with a key each, some 120 MiB
_SIGNS = b"[{,:"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def decode_json_text(data: bytes) -> Any:
    """The value of JSON text in UTF-8. ValueError (UnicodeDecodeError, json.JSONDecodeError) or RecursionError."""
    if len(data) > MOST_VALUES and _values(data) > MOST_VALUES and _values(_STRING.sub(b"", data)) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values in one record")
    return json.loads(data.decode("utf-8"))


def _values(data: bytes) -> int:
    return sum(data.count(sign) for sign in _SIGNS)


def parse_json_text(text: str, name: str) -> Any:
    """The value of JSON that stands as text in a record. WgradError, beginning with `name`."""
    try:
        return decode_json_text(text.encode())
    except (ValueError, RecursionError) as error:
        raise WgradError(f"{name} is text that is not valid JSON: {error}") from error
