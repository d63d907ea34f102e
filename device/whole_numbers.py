"""Whole numbers in texts of users and files."""

from __future__ import annotations

_MOST_DIGITS = 18  # every number of so many digits fits in 64 bits


def whole_number(text: str) -> int | None:
    """Return the number that a text of at most 18 digits stands for; None: it is no such text.

    str.isdigit and str.isdecimal also hold for "²" and for 5,000 digits, which int() refuses with a ValueError.
    """
    return int(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else None
