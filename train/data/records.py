"""Common parts of the readers of data files: records, their longest size, and the columns of tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import one_line
from wgrad.train.options.record_names import NAMES, has_form

Record = bytes | dict[str, Any] | str  # JSON text, a decoded record, or the reason why it cannot be read
Numbered = Iterator[tuple[int, Record]]  # with the number of its line, or of its row in a table, from 1

LONGEST = 256 << 20  # bytes of a line or an element


def too_long(limit: int) -> str:
    return f"longer than {limit >> 20} MiB: cut it into several examples"


def our_names(names: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """Return our names for a table's columns. columns: the mapping of --columns."""
    ours = {theirs: ours for ours, theirs in columns.items() if theirs}
    replaced = {mine for mine, theirs in columns.items() if not theirs or theirs in names}
    return [ours.get(name, "" if name in replaced else name) for name in names]


def check_columns(names: Sequence[str], columns: Mapping[str, str], where: str) -> None:
    """Raise WgradError if a table lacks the columns of a record, or one that --columns names."""
    shown = one_line(", ".join(map(repr, names)) or "none")
    for ours, theirs in columns.items():
        if theirs and theirs not in names and ours not in names:
            raise WgradError(f"{where}: has no column {theirs!r}, which --columns gives for {ours!r}; it has {shown}")
    if not has_form(our_names(names, columns)):
        raise WgradError(
            f"{where}: needs columns named 'text', 'prompt' and 'completion', 'messages', 'instruction' and 'output', "
            f"'conversations', or 'chosen' and 'rejected'; it has {shown}: rename them, or give --columns OURS=THEIRS"
        )
    if len(set(names)) < len(names):
        raise WgradError(f"{where}: two columns have one name; it has {shown}: rename or remove one")


def read_columns(names: Sequence[str], columns: Mapping[str, str], remarks: list[str]) -> list[str]:
    """Return the columns of a table that are read, and add a remark that names the others."""
    read = [n for n, ours in zip(names, our_names(names, columns)) if ours in NAMES or n in columns.values()]
    others = [name for name in names if name not in read and columns.get(name) != ""]
    if others:
        remarks.append(f"columns that are not read: {one_line(', '.join(map(repr, others)))}")
    return read


def without_null(value: Any) -> Any:
    """Return a record of a table without nulls, which stand for missing keys."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value
