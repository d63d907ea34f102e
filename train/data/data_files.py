"""Data files: detecting their kind, refusing other files, and reading records or text with bounded memory."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from wgrad.device.errors import WgradError
from wgrad.train.data.compressed import Unpacked, packed_by
from wgrad.train.data.csv_records import csv_rows, delimiter_of, looks_like_csv
from wgrad.train.data.data_folders import folder_files, is_split_of_folder
from wgrad.train.data.json_records import array_elements, json_kind, listed_elements, object_records
from wgrad.train.data.recoded import Recoded, encoding_of
from wgrad.train.data.records import LONGEST, Numbered, too_long
from wgrad.train.data.saved_data_sets import saved_files
from wgrad.train.data.table_records import table_rows
from wgrad.train.files.hub_data import data_set_files, is_data_set
from wgrad.train.files.input_files import one_line, open_input, reading, refuse_lfs_pointer
from wgrad.train.options.data_sources import STDIN

_LINES = (".jsonl", ".json", ".ndjson")
_TEXT = (".txt", ".md", ".text")
_TABLES = {".csv": ",", ".tsv": "\t"}  # what stands between two cells
_PARQUET = b"PAR1"
_ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # the file format, and the stream format
JSON = ("lines", "array", "objects", "wrapped")  # kinds whose records are JSON text
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
_BLOCK = 1 << 16  # bytes

_AS_LINES = "save it as CSV or Parquet, with the columns 'text', or 'prompt' and 'completion'"
_UNPACK = "unpack it first"
_EXPORT = "save its text as .txt, or as JSON lines"
_OTHER = "give JSON (.jsonl, .json), a table (.csv, .parquet) or plain text (.txt)"
# What a name's ending says that the file is -> what to do.
_REFUSED = {
    ("a table", _AS_LINES): ".orc .avro .xls .xlsx .ods .sqlite .sqlite3 .db",
    ("compressed", _UNPACK): ".gz .bz2 .xz .zst .lz4 .br .z .zip .tar .tgz .tbz2 .txz .7z .rar",
    ("a document with formatting", _EXPORT): ".pdf .doc .docx .odt .rtf .epub .mobi .ppt .pptx .odp .ps .djvu",
    ("an image", _OTHER): ".png .jpg .jpeg .gif .webp .bmp .tif .tiff .ico .heic .psd",
    ("sound or video", _OTHER): ".mp3 .wav .flac .ogg .m4a .aac .mp4 .mkv .avi .mov .webm",
    ("weights or arrays", _OTHER): ".safetensors .bin .pt .pth .gguf .ggml .onnx .npy .npz .pkl .pickle .h5 .ckpt",
    ("a program", _OTHER): ".exe .dll .so .dylib .o .a .pyc .class .jar .whl .deb .rpm .wasm .iso .dmg",
}
_BY_ENDING = {ending: words for words, endings in _REFUSED.items() for ending in endings.split()}
# How such files begin, whatever they are called.
_BEGINNINGS = (
    (b"\x1f\x8b", ".gz"), (b"BZh", ".bz2"), (b"\xfd7zXZ", ".xz"), (b"\x28\xb5\x2f\xfd", ".zst"),
    (b"PK\x03\x04", ".zip"), (b"7z\xbc\xaf", ".7z"), (b"Rar!\x1a", ".rar"), (b"%PDF-", ".pdf"), (b"{\\rtf", ".rtf"),
    (b"\xd0\xcf\x11\xe0", ".doc"),
    (b"\x89PNG", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"GIF8", ".gif"),
    (b"SQLite format 3", ".sqlite"), (b"GGUF", ".gguf"), (b"\x93NUMPY", ".npy"), (b"\x80\x02", ".pkl"),
    (b"\x80\x04", ".pkl"), (b"\x7fELF", ".so"), (b"OggS", ".ogg"), (b"fLaC", ".flac"), (b"ID3", ".mp3"),
)  # fmt: skip


Progress = Callable[[int, int], None]  # hundredths of a file that are read, 100


class _Watch:
    """Tells how far a file of known size is read, at each hundredth."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self._file, self._progress, self._told = file, progress, -1
        self._size = max(os.fstat(file.fileno()).st_size, 1)

    def __call__(self) -> None:
        percent = min(100 * self._file.tell() // self._size, 100)
        if percent != self._told:
            self._told = percent
            self._progress(percent, 100)


@dataclass(frozen=True)
class DataFile:
    """An open data file.

    name: for messages.
    kind: "text", "csv", "tsv", "parquet", "arrow", or one of JSON: "lines", "array", "objects" (over several lines), or
        "wrapped" (a list under `key` of one object).
    notes: notes for the user.
    watch: called after each read.
    columns: the mapping of --columns.
    delimiter: between the cells of a table.
    remarks: further notes, added as records are read.
    """

    file: BinaryIO
    name: str
    option: str
    kind: str
    notes: tuple[str, ...]
    watch: Callable[[], None] = lambda: None
    columns: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    delimiter: str = ","
    remarks: list[str] = field(default_factory=list)

    def empty(self) -> WgradError:
        """Return the error of a file without content."""
        return WgradError(f"{self.option}: {self.name} is empty: give a file with at least one example")

    def records(self) -> Numbered:
        """Return the records of a file that is not plain text, each with the number of its line or row."""
        if self.kind == "array":
            return array_elements(self._byte_blocks(), self.name, self.option)
        if self.kind == "objects":
            return object_records(self._byte_blocks(), self.name, self.option)
        if self.kind == "wrapped":
            return listed_elements(self._byte_blocks(), self.key, self.name, self.option, self.remarks)
        if self.kind in ("parquet", "arrow"):
            return table_rows(self.file, self.kind, self.name, self.option, self.columns, self.remarks)
        if self.kind == "lines":
            return self._lines()
        return csv_rows(self._lines(), self.delimiter, self.name, self.option, self.columns, self.remarks)

    def _lines(self) -> Numbered:
        """Yield the lines without their newlines."""
        number = 0
        while line := self._read_line(LONGEST):
            number += 1
            is_whole = len(line) < LONGEST or line.endswith(b"\n")
            if not is_whole:
                while (rest := self._read_line(_BLOCK)) and not rest.endswith(b"\n"):
                    pass
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            line = line.removesuffix(b"\n")  # the name of what is read, which a generator at rest keeps alive
            yield number, line if is_whole else too_long(LONGEST)

    def _byte_blocks(self) -> Iterator[bytes]:
        block = self._read_block().removeprefix(codecs.BOM_UTF8)
        while block:
            yield block
            block = self._read_block()

    def _read_block(self) -> bytes:
        with reading(self.name, self.option):
            block = self.file.read(_BLOCK)
            self.watch()
        return block

    def _read_line(self, limit: int) -> bytes:
        with reading(self.name, self.option):
            line = self.file.readline(limit)
            self.watch()
        return line

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks, with \\r\\n as \\n.

        Raises:
            WgradError: a line, which the error names, is not UTF-8 or has a NUL.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        lines, kept, is_first = 1, "", True
        while True:
            block = self._read_block()
            try:
                text = kept + decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start)
                raise WgradError(
                    f"{self.name}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}): convert the file to UTF-8"
                ) from error
            if "\0" in text:
                line = lines + text.count("\n", 0, text.index("\0"))
                raise WgradError(f"{self.name}:{line}: a NUL character: the file is not text: {_OTHER}")
            if is_first:
                text = text.removeprefix("\ufeff")
            kept = "\r" if text.endswith("\r") and block else ""  # the \n may be the next block's
            lines += block.count(b"\n")
            text = text.removesuffix(kept).replace("\r\n", "\n")
            if text:
                is_first = False
                yield text
            if not block:
                return


def list_data(path: str, option: str, held_out: bool = False) -> tuple[list[str], tuple[str, ...]]:
    """Return the files of a folder (`folder_files`), of a split that the package datasets saved, or of a data set of
    the hub, of anything else its own path; and notes for the user. Raises WgradError.

    held_out: without a split, prefer one for validation or tests (`usual_split`).
    """
    if path == STDIN:
        return [path], ()
    if found := saved_files(path, option, held_out):
        return found
    if os.path.isdir(path) or is_split_of_folder(path):
        return folder_files(path, option, held_out)
    return data_set_files(path, option, held_out) if is_data_set(path, option) else ([path], ())


@contextmanager
def open_data(
    path: str,
    option: str,
    progress: Progress | None = None,
    stdin: Path | None = None,
    columns: Mapping[str, str] = _NO_COLUMNS,
) -> Iterator[DataFile]:
    """Open a data file, or standard input for "-".

    Args:
        path: the file.
        option: the option that names it.
        progress: called with the percentage that is read; not for standard input.
        stdin: a copy of standard input, to be read in its place.
        columns: the mapping of --columns.

    Raises:
        WgradError: the file is not a regular file, is empty, or is of an unsupported kind.
    """
    name = "standard input" if path == STDIN else path
    is_stdin = path == STDIN and stdin is None
    opened = open_standard_input(option) if is_stdin else open_input(stdin if stdin and path == STDIN else path, option)
    file: BinaryIO = opened
    try:
        with reading(path, option):
            start = opened.peek(_BLOCK)  # type: ignore[attr-defined]
            called = "" if path == STDIN else path
            if packing := packed_by(start, called):
                file = io.BufferedReader(Unpacked(opened, packing, f"{option}: {name}"), _BLOCK)
                start, called = file.peek(_BLOCK), os.path.splitext(called)[0]
            if encoding := encoding_of(start):
                file = io.BufferedReader(Recoded(file, encoding, f"{option}: {name}"), _BLOCK)
                start = file.peek(_BLOCK)
        refuse_lfs_pointer(start, path, option)
        _refuse_other_kinds(start, called, name, option)
        if not start.removeprefix(codecs.BOM_UTF8):
            raise WgradError(f"{option}: {name} is empty: give a file with at least one example")
        if file is not opened and start.startswith((_PARQUET, *_ARROW)):
            how = f"saved as {encoding.upper()} text" if encoding else "packed once more"
            raise WgradError(f"{option}: {name} is Parquet or Arrow {how}: write it again")
        if is_stdin and start.startswith((_PARQUET, *_ARROW)):
            raise WgradError(f"{option}: {name} is Parquet or Arrow, whose end must be read first: give it as a file")
        text = start.removeprefix(codecs.BOM_UTF8)
        kind, notes = _kind(text, called, name, option, columns)
        more: dict[str, Any] = {"columns": columns}
        if kind == "json":
            kind, more["key"] = json_kind(text, set(columns.values()))
            if kind != "lines":
                what = {"objects": "objects of JSON", "wrapped": f"JSON with a list under {more['key']!r}"}[kind]
                notes = (f"note: {name} is taken for {one_line(what)}, each an example",)
        if kind in ("csv", "tsv"):
            more["delimiter"] = delimiter_of(text, _TABLES["." + kind], columns)
        if progress is not None and not is_stdin:
            more["watch"] = _Watch(opened, progress)
        yield DataFile(file, name, option, kind, notes, **more)
    finally:
        if not is_stdin:
            opened.close()


def open_standard_input(option: str) -> BinaryIO:
    """Return standard input. Raises WgradError if it is a terminal, or closed."""
    if sys.stdin is None or sys.stdin.isatty():
        raise WgradError(f"{option}: standard input is no file: give its data with '< FILE' or a pipe")
    return sys.stdin.buffer


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _refuse_other_kinds(start: bytes, path: str, name: str, option: str) -> None:
    """Raise WgradError if a file's name or first bytes are those of an unsupported kind."""
    ending = _ending(path)
    found = next((kind for magic, kind in _BEGINNINGS if start.startswith(magic)), None)
    if ending in _BY_ENDING:
        what, advice = _BY_ENDING[ending]
        raise WgradError(f"{option}: {name} is {what} by its name ({ending}): {advice}")
    if found is not None:
        what, advice = _BY_ENDING[found]
        raise WgradError(f"{option}: {name} is {what} by its first bytes (as of a {found} file): {advice}")
    if b"\0" in start and not start.startswith((_PARQUET, *_ARROW)):
        raise WgradError(f"{option}: {name} has NUL bytes, so it is not text: {_OTHER}")


def _kind(start: bytes, path: str, name: str, option: str, columns: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the kind of a file (see DataFile; "json" if its layout is still unknown), and notes for the user.

    The ending of the name decides. If that is unknown, the first bytes do.
    """
    ending, first = _ending(path), start.lstrip()[:1]
    if start.startswith(_PARQUET):
        return "parquet", (f"note: {name} is taken for Parquet, each row an example",)
    if ending == ".parquet":
        raise WgradError(f"{option}: {name} is Parquet by its name, but does not begin with PAR1: write it again")
    if start.startswith(_ARROW):
        return "arrow", (f"note: {name} is taken for Arrow, each row an example",)
    if ending in (".arrow", ".feather"):
        raise WgradError(f"{option}: {name} is Arrow by its name, but does not begin as such: write it again")
    if ending in _TEXT:
        if first == b"{" and b'"' in start:
            note = f"note: {name} is plain text by its name, and looks like JSON lines: rename it to .jsonl if it is"
            return "text", (note,)
        return "text", ()
    if ending in _TABLES or (ending not in _LINES and looks_like_csv(start, columns)):
        kind = ending[1:] if ending in _TABLES else "csv"
        return kind, (
            f"note: {name} is taken for {kind.upper()}, its first row the names, each further row an example",
        )
    if first == b"[" and (ending != ".jsonl" or start.lstrip()[1:].lstrip().startswith(b"{")):
        return "array", (f"note: {name} is taken for a JSON array, each element an example",)
    if ending in _LINES:
        return "json" if first == b"{" else "lines", ()
    why = f"its name ends in {ending}" if ending else "its name does not say what it is" if path else ""
    taken = "JSON lines" if first == b"{" else "plain text, of which every token is trained on"
    note = f"note: {name} is taken for {taken}" + (f" ({why}; .jsonl and .txt are known)" if why else "")
    return "json" if first == b"{" else "text", (note,)
