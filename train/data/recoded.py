"""Text in UTF-16 or UTF-32, as Windows saves it, read as UTF-8."""

from __future__ import annotations

import codecs
import io
from typing import Any, BinaryIO

from wgrad.device.errors import WgradError

_BLOCK = 1 << 16  # bytes
_MARKS = (  # UTF-32 first: one of its marks begins with one of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


def encoding_of(start: bytes) -> str:
    """Return the encoding that a byte order mark names; "" for UTF-8 or without a mark. start: of the file."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), "")


class Recoded(io.RawIOBase):
    """A text file in another encoding, read as UTF-8. where: option and name, which begin an error."""

    def __init__(self, file: BinaryIO, encoding: str, where: str) -> None:
        self._file, self._encoding, self._where = file, encoding, where
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._left, self._is_over = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and not self._is_over:
            block = self._file.read(_BLOCK)
            self._is_over = not block
            try:
                self._left = self._decoder.decode(block, final=self._is_over).encode("utf-8")
            except UnicodeError as error:
                reason = getattr(error, "reason", "not text")
                raise WgradError(
                    f"{self._where} begins as {self._encoding.upper()}, but is not valid {self._encoding.upper()} "
                    f"({reason}): save it as UTF-8"
                ) from error
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
