"""Records of JSON that is not one object per line: an array, a list within an object, or objects over several lines.

The text is cut into records before they are decoded, so that it is never in memory whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from wgrad.device.errors import WgradError
from wgrad.train.data.json_text import decode_json_text
from wgrad.train.data.records import LONGEST, Numbered, Record, too_long
from wgrad.train.files.input_files import one_line
from wgrad.train.options.record_names import FORMS, has_form

_OUTSIDE, _INSIDE = re.compile(rb'["\[\]{},]'), re.compile(rb'["\\]')
_MEMBER = re.compile(rb'\s*"((?:[^"\\]|\\.){0,200})"\s*:')  # the beginning of a member of an object
_OF_RECORDS = {name for form in FORMS for name in form}
_BETWEEN = b" \t\r\n,\x1e"  # allowed between two objects; 0x1e: JSON text sequences

Cut = tuple[bytes, bytes, int]  # text, the sign after it (b"" if the text continues), and the sign's level


def _cut(blocks: Iterable[bytes], deepest: int) -> Iterator[Cut]:
    """Cut the text at brackets and commas of levels 1 to `deepest`; brackets have the level of their contents."""
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
                level = depth + (sign in b"[{")
                depth = level - (sign in b"]}")
                if 1 <= level <= deepest:
                    yield block[begin : at - 1], sign, level
                    begin = at
        yield block[begin:], b"", 0


# ---- the layout of a file ------------------------------------------------------------------------
def json_kind(start: bytes, known: Collection[str]) -> tuple[str, str]:
    """Return the layout of a file that begins with an object: "lines", "objects" (over several lines), or "wrapped"
    with the key of the list in it. start: the first bytes; known: keys that --columns names."""
    line, newline, rest = start.lstrip().partition(b"\n")
    try:
        value = decode_json_text(line)
    except (ValueError, RecursionError):  # the line may be incomplete
        pass
    else:
        key = _wrapped_key(line, known) if isinstance(value, dict) and not rest.strip() else ""
        return ("wrapped", key) if key and not has_form(value) else ("lines", "")
    if key := _wrapped_key(start, known):
        return "wrapped", key
    return ("objects" if _goes_on(line.strip(), newline + rest) else "lines"), ""


def _goes_on(line: bytes, rest: bytes) -> bool:
    """Return whether the object that begins a line ends on a later one, or another follows on the same line."""
    length = 0
    for text, sign, _ in _cut([line], 1):
        length += len(text) + len(sign)
        if sign == b"}":
            after = line[length:].strip()
            return after == b"," or after.lstrip(_BETWEEN).startswith(b"{")
    # A line of JSON lines may be cut short: then another object follows it.
    is_within = line[-1:] in (b"[", b":") or (line[-1:] in (b"{", b",") and not rest.lstrip().startswith(b"{"))
    return bool(rest) and is_within


def _wrapped_key(start: bytes, known: Collection[str]) -> str:
    """Return the key of the first list of objects in an object that is not itself a record; "" if there is none."""
    member, key, found, is_list = b"", "", "", False
    for text, sign, level in _cut([start], 3):
        if is_list and sign == b"{" and level == 3 and not text.strip():
            found = found or key
        is_list = False
        if level <= 2 and (match := _MEMBER.match(member + text)):
            key = match[1].decode("utf-8", "replace")
            if key in _OF_RECORDS or key in known:
                return ""
            is_list = sign == b"[" and level == 2
        if level == 1 and sign == b"}":
            break
        member = b"" if level == 1 else (member + text)[:400]
    return found


# ---- records -------------------------------------------------------------------------------------
class _Element:
    """The text of a record as it is read; at most LONGEST bytes are kept."""

    def __init__(self) -> None:
        self._text, self.size = bytearray(), 0

    def add(self, text: bytes) -> None:
        self.size += len(text)
        if self.size <= LONGEST:
            self._text += text

    def take(self) -> Record:
        record: Record = bytes(self._text) if self.size <= LONGEST else too_long(LONGEST)
        self._text.clear()  # free the memory before the record is decoded
        self.size = 0
        return record


def array_elements(blocks: Iterable[bytes], name: str, option: str) -> Numbered:
    """Yield the text of each element of an array, given in blocks.

    Raises:
        WgradError: the array does not end, lacks an element, or is followed by more text.
    """
    return _elements(_cut(blocks, 1), f"{option}: {name}")


def listed_elements(blocks: Iterable[bytes], key: str, name: str, option: str, remarks: list[str]) -> Numbered:
    """Yield the text of each element of the list under `key` of an object, given in blocks.

    remarks: a list to which notes for the user are added.

    Raises:
        WgradError: as in `array_elements`, or the object has another list of objects.
    """
    where = f"{option}: {name}"
    return _elements(_listed(_cut(blocks, 3), key, where, remarks), where)


def _listed(cuts: Iterable[Cut], key: str, where: str, remarks: list[str]) -> Iterator[Cut]:
    """Yield the cuts of the list as those of an array; the text before it has no sign."""
    member, other, found, inside, is_closed = b"", "", False, False, False
    for text, sign, level in cuts:
        if is_closed and (text + sign).strip():
            raise WgradError(f"{where}: more follows the object with {key!r}: keep one object in a file")
        if inside:
            if level == 2:
                yield text, sign, 1
                inside = sign != b"]"
                member = b""
            else:
                yield text + sign, b"", 0
            continue
        if other and sign == b"{" and level == 3 and not text.strip():  # another list of objects
            if key not in ("train", "training"):
                raise WgradError(f"{where}: has lists under {key!r} and {other!r}: keep one list in a file")
            remarks.append(f"the list under {one_line(repr(other))}, which is not read: give it as --eval-data FILE")
        other = ""
        if sign == b"[" and level == 2:
            match = _MEMBER.match(member + text)
            this = match[1].decode("utf-8", "replace") if match else ""
            if this == key and not found:
                found = inside = True
                yield text, sign, 1
                continue
            other = this
        is_closed = is_closed or (sign == b"}" and level == 1)
        if not found:
            yield text + sign, b"", 0
        member = b"" if level == 1 else (member + text)[:400]


def _elements(cuts: Iterable[Cut], where: str) -> Numbered:
    line, start, count = 1, 1, 0
    is_open = is_closed = False
    element = _Element()
    for piece, sign, _ in cuts:
        if is_closed and (more := piece + sign).strip():
            line += more.count(b"\n", 0, len(more) - len(more.lstrip()))
            raise WgradError(f"{where}:{line}: more follows the end of the array: keep one array in a file")
        blank = 0 if element.size else len(piece) - len(piece.lstrip())
        if is_open and not is_closed:
            start = start if element.size else line + piece.count(b"\n", 0, blank)
            element.add(piece[blank:])
        line += piece.count(b"\n")
        if sign and is_open and not is_closed:
            if sign == b"}":
                raise WgradError(f"{where}:{line}: the array is closed by a brace: write the bracket ] instead")
            if element.size:
                yield start, element.take()
            elif count or sign == b",":
                raise WgradError(f"{where}:{line}: a comma of the array with nothing next to it: remove the comma")
            count, is_closed = count + 1, sign == b"]"
        is_open = is_open or bool(sign)
    if not is_closed:
        raise WgradError(f"{where}:{line}: the file ends within the array: it is cut short, or lacks a ']' or a quote")


def object_records(blocks: Iterable[bytes], name: str, option: str) -> Numbered:
    """Yield the text of each of several objects, over any number of lines.

    Raises:
        WgradError: the last object does not end.
    """
    line, start, is_open = 1, 1, False
    element = _Element()
    for piece, sign, _ in _cut(blocks, 1):
        if is_open:
            element.add(piece + sign)
        elif piece.strip(_BETWEEN):
            first = line + piece.count(b"\n", 0, len(piece) - len(piece.lstrip(_BETWEEN)))
            yield first, f"text between two objects: {one_line(repr(piece.strip()[:40].decode('utf-8', 'replace')))}"
        line += piece.count(b"\n")
        if is_open and sign in (b"}", b"]"):
            yield start, element.take()
            is_open = False
        elif not is_open and sign in (b"{", b"["):
            start, is_open = line, True
            element.add(sign)
    if is_open:
        raise WgradError(f"{option}: {name}:{start}: the object is not closed: the file is cut short, or lacks a brace")
