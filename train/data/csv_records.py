"""Records of CSV. Rows are separated before they are decoded, so that no file is in memory whole."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.json_text import decode_json_text
from wgrad.train.data.records import LONGEST, Numbered, Record, check_columns, our_names, read_columns, too_long
from wgrad.train.options.record_names import IN_JSON, has_form

LONGEST_ROW = 1 << 20  # bytes of a row: the csv module holds a cell at 4 to 8 bytes a character
_DELIMITERS = ",;\t|"
_SEPARATOR = re.compile(rb"sep=(.)\r?")  # a first line of Excel's
_OR_MESSAGES = ("prompt", "completion", "chosen", "rejected")  # may be text, too


def delimiter_of(start: bytes, usual: str, columns: Mapping[str, str]) -> str:
    """Return the delimiter with which the header has the names of a record's columns, and of several the one with the
    most cells: an index that pandas writes has an empty name.

    start: the first bytes of the file; usual: the delimiter to prefer; columns: the mapping of --columns.
    """
    line = start.partition(b"\n")[0]
    if told := _SEPARATOR.fullmatch(line):
        return told[1].decode("latin-1")
    headers = {mark: _header(line, mark) for mark in dict.fromkeys(usual + _DELIMITERS)}
    found = [mark for mark, names in headers.items() if has_form(our_names(names, columns))]
    return max(found or headers, key=lambda mark: (len(headers[mark]), mark == usual))


def looks_like_csv(start: bytes, columns: Mapping[str, str]) -> bool:
    """Return whether these first bytes of a file are a header of several plain names that include a record's."""
    line, newline, _ = start.partition(b"\n")
    names = _cells(line, delimiter_of(start, ",", columns))
    plain = isinstance(names, list) and len(names) > 1 and all(re.fullmatch(r"\w+", name) for name in names)
    return bool(newline) and plain and has_form(our_names(names, columns))


def _header(line: bytes, delimiter: str) -> list[str]:
    cells = _cells(line, delimiter)
    return [cell.strip() for cell in cells] if isinstance(cells, list) else []


def csv_rows(
    lines: Iterable[tuple[int, Record]],
    delimiter: str,
    name: str,
    option: str,
    columns: Mapping[str, str] = MappingProxyType({}),
    remarks: list[str] | None = None,
) -> Numbered:
    """Yield a record for each row, with the names of the first row as keys.

    Columns that are not part of a record are left out, as are empty cells where JSON is expected.

    Args:
        lines: numbered lines without their newlines.
        columns: the mapping of --columns.
        remarks: a list to which notes for the user are added.

    Raises:
        WgradError: the header does not name the columns of a record, or a quote is never closed.
    """
    csv.field_size_limit(LONGEST_ROW)
    names, read = list[str](), set[str]()
    for line, row in _joined_rows(lines, delimiter, f"{option}: {name}"):
        if not names and isinstance(row, bytes) and _SEPARATOR.fullmatch(row):
            continue
        cells = _cells(row, delimiter) if isinstance(row, bytes) else row
        if not names:
            if isinstance(cells, str):
                raise WgradError(f"{option}: {name}:{line}: the header cannot be read: {cells}")
            names = [cell.strip() for cell in cells]
            named = [column for column in names if column]  # the index that pandas writes has no name
            check_columns(named, columns, f"{option}: {name}:{line}")
            read = set(read_columns(named, columns, remarks if remarks is not None else []))
            ours = our_names(names, columns)
        elif isinstance(cells, str):
            yield line, cells
        elif cells:
            yield line, _row_record(names, ours, read, cells)


def _ends_in_quotes(line: bytes, delimiter: bytes, is_quoted: bool) -> bool:
    """Return whether the line ends within a quoted cell. is_quoted: whether it begins in one.

    Only a quote at the start of a cell opens it; another one is part of the cell.
    """
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
                at += 1  # a doubled quote
            else:
                is_quoted = False
                at = line.find(delimiter, at) + 1
                if at == 0:
                    return False
    return is_quoted


def _joined_rows(lines: Iterable[tuple[int, Record]], delimiter: str, where: str) -> Iterator[tuple[int, bytes | str]]:
    """Yield rows: lines, joined where a quoted cell continues on the next line."""
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
    """Return the cells of a row ([] for a blank one), or the reason why it cannot be read."""
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


def _row_record(names: list[str], ours: list[str], read: set[str], cells: list[str]) -> Record:
    if len(cells) != len(names):
        return f"the header names {len(names)} columns; the row has {len(cells)} cells: quote cells that hold a comma"
    record: dict[str, Any] = {}
    for name, mine, cell in zip(names, ours, cells):
        if name not in read:
            continue
        if mine in IN_JSON:
            if not cell.strip():
                continue
            try:
                record[name] = decode_json_text(cell.encode())
            except (ValueError, RecursionError) as error:
                return f"{name!r} must be JSON in CSV; it is not valid: {error}"
        else:
            record[name] = _text_or_messages(cell) if mine in _OR_MESSAGES else cell
    return record


def _text_or_messages(cell: str) -> Any:
    if re.match(r"\s*\[\s*\{", cell) and cell.rstrip().endswith("]"):
        try:
            value = decode_json_text(cell.encode())
        except (ValueError, RecursionError):
            return cell
        if all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in value):
            return value
    return cell
