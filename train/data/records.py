"""Records of a data file that is not JSON lines: the elements of a JSON array, the rows of CSV and of Parquet.

An array is cut into its elements and CSV into its rows before anything is decoded, so that neither is held as a whole.
Of Parquet a few rows are held, and of each column that is used what the file compresses as one piece.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import one_line
from wgrad.train.options.record_names import IN_JSON, NAMES, has_form

Record = bytes | dict[str, Any] | str  # JSON text; a record that is decoded; or why there is none at this place
Numbered = Iterator[tuple[int, Record]]  # with the number of its line (Parquet: of its row), from 1

LONGEST = 256 << 20  # bytes of a line or an element
LONGEST_ROW = 1 << 20  # bytes of a row of CSV: the csv module holds a cell at 4 to 8 bytes a character

_ROWS_AT_ONCE = 64
_OUTSIDE, _INSIDE = re.compile(rb'["\[\]{},]'), re.compile(rb'["\\]')


def too_long(limit: int) -> str:
    return f"longer than {limit >> 20} MiB: cut it into several examples"


def _check_columns(columns: list[str], where: str) -> None:
    shown = one_line(", ".join(map(repr, columns)) or "none")
    if not has_form(columns):
        raise WgradError(
            f"{where}: needs columns named 'text', 'prompt' and 'completion', 'messages', 'instruction' and 'output', "
            f"'conversations', or 'chosen' and 'rejected'; it has {shown}: rename them"
        )
    if len(set(columns)) < len(columns):
        raise WgradError(f"{where}: two columns have one name; it has {shown}: rename or remove one")


# ---- JSON array --------------------------------------------------------------------------------
def array_elements(blocks: Iterable[bytes], name: str, option: str) -> Numbered:
    """The text of each element of the array that the blocks make together.

    WgradError where the array does not end, has an empty place, or is followed by anything.
    """
    where, line, start, size, count = f"{option}: {name}", 1, 1, 0, 0
    is_open = is_closed = False
    element = bytearray()  # no more than LONGEST bytes of its `size`
    for piece, sign in _cut(blocks):
        if is_closed and (more := piece + sign).strip():
            line += more.count(b"\n", 0, len(more) - len(more.lstrip()))
            raise WgradError(f"{where}:{line}: more follows the end of the array: keep one array in a file")
        blank = 0 if size else len(piece) - len(piece.lstrip())
        if is_open and not is_closed:
            start = start if size else line + piece.count(b"\n", 0, blank)
            size += len(piece) - blank
            if size <= LONGEST:
                element += memoryview(piece)[blank:]
        line += piece.count(b"\n")
        if sign and is_open and not is_closed:
            if sign == b"}":
                raise WgradError(f"{where}:{line}: the array is closed by a brace: write the bracket ] instead")
            if size:
                record: Record = bytes(element) if size <= LONGEST else too_long(LONGEST)
                element.clear()  # before the record is decoded
                yield start, record
            elif count or sign == b",":
                raise WgradError(f"{where}:{line}: nothing beside a comma of the array: remove the comma")
            size, count, is_closed = 0, count + 1, sign == b"]"
        is_open = is_open or bool(sign)
    if not is_closed:
        raise WgradError(f"{where}:{line}: the file ends within the array: it is cut short, or lacks a ']' or a quote")


def _cut(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """-> text, and the sign behind it: the bracket that opens the array, a comma or bracket that ends an element; b"":
    the text goes on."""
    depth, inside, escaped = 0, False, False
    for block in blocks:
        begin, at, escaped = 0, int(escaped), False
        while found := (_INSIDE if inside else _OUTSIDE).search(block, at):
            sign, at = found[0], found.end()
            if sign == b"\\":
                escaped = at == len(block)
                at += 1
            elif sign == b'"':
                inside = not inside
            else:
                opens = sign in b"[{"
                depth += opens - (sign in b"]}")
                if depth == (1 if opens or sign == b"," else 0):
                    yield block[begin : at - 1], sign
                    begin = at
        yield block[begin:], b""


# ---- CSV ---------------------------------------------------------------------------------------
def looks_like_csv(start: bytes) -> bool:
    """Whether a file that begins so has a header of plain names, more than one, of which a record is made."""
    line, newline, _ = start.partition(b"\n")
    names = line.rstrip(b"\r").decode("utf-8", "replace").split(",")
    return bool(newline) and len(names) > 1 and all(re.fullmatch(r"\w+", name) for name in names) and has_form(names)


def csv_rows(lines: Iterable[tuple[int, Record]], delimiter: str, name: str, option: str) -> Numbered:
    """A record of each row, under the names of the first; columns that no record has are left out, as are empty cells
    where JSON belongs.

    lines: numbered, without their newlines. WgradError where the header has no names of which a record is made, or a
    quote is never closed.
    """
    csv.field_size_limit(LONGEST_ROW)
    columns: list[str] = []
    for line, row in _joined_rows(lines, delimiter, f"{option}: {name}"):
        cells = _cells(row, delimiter) if isinstance(row, bytes) else row
        if not columns:
            if isinstance(cells, str):
                raise WgradError(f"{option}: {name}:{line}: the header cannot be read: {cells}")
            columns = [cell.strip() for cell in cells]
            _check_columns([column for column in columns if column], f"{option}: {name}:{line}")
        elif isinstance(cells, str):
            yield line, cells
        elif cells:
            yield line, _row_record(columns, cells)


def _ends_in_quotes(line: bytes, delimiter: bytes, is_quoted: bool) -> bool:
    """Whether the next line goes on with a quoted cell. is_quoted: this one does. A quote opens a cell at its beginning
    alone: one within is the cell's own."""
    at = 0
    while b'"' in line[at:]:
        if not is_quoted:
            while line[at : at + 1] != b'"':
                at = line.find(delimiter, at) + 1
                if at == 0:
                    return False
            is_quoted, at = True, at + 1
        else:
            at = line.find(b'"', at) + 1
            if line[at : at + 1] == b'"':
                at += 1  # a doubled one
            else:
                is_quoted = False
                at = line.find(delimiter, at) + 1
                if at == 0:
                    return False
    return is_quoted


def _joined_rows(lines: Iterable[tuple[int, Record]], delimiter: str, where: str) -> Iterator[tuple[int, bytes | str]]:
    """Lines, those of which a quoted cell goes on put together."""
    row, start, size, is_quoted, mark = bytearray(), 1, 0, False, delimiter.encode()
    for number, line in lines:
        start = start if is_quoted else number
        text = line if isinstance(line, bytes) else b""
        size += len(text) + 1 if line is text else LONGEST
        is_quoted = _ends_in_quotes(text, mark, is_quoted)
        if size <= LONGEST_ROW:
            row += text + b"\n"
        if not is_quoted:
            yield start, bytes(row[:-1]) if size <= LONGEST_ROW else too_long(LONGEST_ROW)
            row.clear()
            size = 0
    if is_quoted:
        raise WgradError(f"{where}:{start}: a quote in this row is never closed: close it, or double it within a cell")


def _cells(row: bytes, delimiter: str) -> list[str] | str:
    """Cells of a row, [] of a blank one; or why it has none."""
    if b"\0" in row:
        return "a NUL character, so it is not text: remove it"
    try:
        text = row.decode("utf-8").removesuffix("\r")
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte 0x{row[error.start]:02x}): convert the file to UTF-8"
    except csv.Error as error:
        return f"not valid CSV: {error}: quote a cell as a whole and double the quotes within"
    if len(rows) > 1:
        return "not valid CSV: a quote within a cell that is not quoted, or a carriage return outside quotes: quote it"
    return rows[0] if rows and text.strip() else []


def _row_record(columns: list[str], cells: list[str]) -> Record:
    if len(cells) != len(columns):
        return f"the header names {len(columns)} columns; the row has {len(cells)} cells: quote cells that hold a comma"
    record: dict[str, Any] = {}
    for column, cell in zip(columns, cells):
        if column in IN_JSON:
            if not cell.strip():
                continue
            try:
                record[column] = json.loads(cell)
            except (ValueError, RecursionError) as error:
                return f"{column!r} must be JSON in CSV; it is not valid: {error}"
        elif column in NAMES:
            record[column] = cell
    return record


# ---- Parquet -----------------------------------------------------------------------------------
def parquet_rows(file: BinaryIO, name: str, option: str) -> Numbered:
    """A record of each row, without what is null in it: columns of structures fill with null what a row lacks.

    WgradError where pyarrow is not installed or cannot read the file, or no record can be made of its columns.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise WgradError(
            f"{option}: {name} is a Parquet file, which takes a package: pip install 'wgrad[parquet]'"
        ) from None
    try:
        usual = pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others keep some 8 MiB more than they hand out
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 16)
        finally:
            pyarrow.set_memory_pool(usual)
        columns = list(table.schema_arrow.names)
        _check_columns(columns, f"{option}: {name}")
        number = 0
        wanted = [column for column in columns if column in NAMES]
        for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield number, without_null(row)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise WgradError(f"{option}: {name} cannot be read as Parquet: {reason}: write it again") from error


def without_null(value: Any) -> Any:
    """A record of a table, without the nulls that fill up what it lacks."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
