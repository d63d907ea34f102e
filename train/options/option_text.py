"""Texts that users give to a command: in an option, or on standard input."""

from __future__ import annotations

import re
import sys

from wgrad.device.errors import WgradError


def check_text(text: str, source: str) -> str:
    """Return a text unchanged. Raise WgradError, naming `source` (the option), if it has half a surrogate pair.

    Bytes of the command line that are not UTF-8 become such halves, which no tokenizer accepts.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        got = f"byte {half - 0xDC00:#04x}" if 0xDC80 <= half <= 0xDCFF else f"half a surrogate pair, {half:#x}"
        raise WgradError(
            f"{source}: must be UTF-8 text; got {got} at character {error.start}: save it as UTF-8"
        ) from error
    return text


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(?:([KMGT])(i?B)?|B)?", re.IGNORECASE)
_FEW_BYTES = 4096


def parse_size(text: str) -> int | None:
    """Parse a size into bytes: 3GiB and 3G are 3 * 2^30, 3GB is 3 * 10^9. None: the text is no size."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit, suffix = found.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    nbytes = int(float(number) * base ** ("KMGT".index(unit.upper()) + 1 if unit else 0))
    return nbytes or None


def is_size(text: str) -> bool:
    """Return whether a text is a size. A few bytes are none: whoever gives 24 means GiB, and has left that out."""
    nbytes = parse_size(text)
    return nbytes is not None and (nbytes >= _FEW_BYTES or not text.strip().isdecimal())


def read_stdin(source: str) -> str:
    """Read standard input as UTF-8, whatever the locale is. WgradError, naming `source`: that fails."""
    try:
        data = sys.stdin.buffer.read()
    except (OSError, AttributeError) as error:  # AttributeError: the process was started without standard input
        reason = getattr(error, "strerror", None) or "there is none"
        raise WgradError(f"{source}: cannot read standard input: {reason}: give the text itself") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        got = f"byte {data[error.start]:#04x} at {error.start}"
        raise WgradError(f"{source}: standard input must be UTF-8 text; got {got}: convert it") from error


def size(count: int) -> str:
    """Return a number of bytes for people, such as 12.3 MiB or 1.23 GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
