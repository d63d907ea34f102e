"""Text compressed by gzip or Zstandard, decompressed as it is read.

A few bytes may unpack to a great many, so the size of the file limits them, as it limits tables (`table_records.py`).
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from typing import Any, BinaryIO

from wgrad.device.errors import WgradError
from wgrad.train.data.table_records import most_expanded
from wgrad.train.files.input_files import one_line

_MARKS = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd"}
_ENDINGS = {".gz": "gzip", ".zst": "zstd"}
_AGAIN = "pack it again, or give it unpacked"


def packed_by(start: bytes, path: str) -> str:
    """Return the compression of a file, "" for none. The file's first bytes and its name must both say so.

    path: the file's name; "" for standard input, which only needs the first bytes.
    """
    by_name = _ENDINGS.get(os.path.splitext(path)[1].lower(), "")
    by_start = next((name for name, mark in _MARKS.items() if start.startswith(mark)), "")
    return by_start if by_start == by_name or not path else ""


class Unpacked(io.RawIOBase):
    """The decompressed contents of a file. where: begins each error.

    Raises:
        WgradError: the file cannot be unpacked. Reading raises it too.
    """

    def __init__(self, file: BinaryIO, packing: str, where: str) -> None:
        self._where, self._packing = where, packing
        try:
            nbytes = os.fstat(file.fileno()).st_size
        except OSError:  # standard input of some systems
            nbytes = 0
        self._most = most_expanded(nbytes)
        self._left = self._most
        self._stream = self._open(file)

    def _open(self, file: BinaryIO) -> Any:
        if self._packing == "gzip":
            return gzip.GzipFile(fileobj=file, mode="rb")
        try:
            import pyarrow
        except ImportError:
            raise WgradError(
                f"{self._where} is packed by Zstandard, which takes a package: pip install 'wgrad[parquet]'"
            ) from None
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._stream.read(len(buffer))
        except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's are among these
            reason = one_line(str(error))[:200] or type(error).__name__
            raise WgradError(f"{self._where} cannot be unpacked ({self._packing}): {reason}: {_AGAIN}") from error
        self._left -= len(block)
        if self._left < 0:
            raise WgradError(
                f"{self._where} unpacks to more than {self._most >> 20} MiB: give it unpacked, if it is meant so"
            )
        buffer[: len(block)] = block
        return len(block)
