"""Values and numbers in texts for people."""

from __future__ import annotations

_MOST = 80


def short(value: object) -> str:
    """Return a value as Python writes it, on one line of limited length.

    Python refuses to write whole numbers of more than 4,300 digits, and a user's __repr__ may raise anything.
    """
    try:
        text = repr(value)
    except Exception:
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _MOST else f"{text[:60]}...{text[-10:]}"


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 step", "1,200 steps". many: the plural, if it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def as_text(path: str) -> str:
    """Return a path as UTF-8 text; a byte of it that is none is escaped."""
    return path.encode("utf-8", "backslashreplace").decode()
