"""Records of Parquet and Arrow files: rows in small batches, of only the columns that are read.

Such a file may be compressed a thousandfold, or repeat a value a billion times. So its expanded size is bounded by its
file size, and measured before any of it becomes a Python object. While a batch is made, the memory of this process has
the same bound, if the system can limit it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeVar

from wgrad.device.errors import WgradError
from wgrad.train.data.records import Numbered, check_columns, read_columns, without_null
from wgrad.train.files.input_files import one_line
from wgrad.train.files.memory_bound import memory_within

T = TypeVar("T")

_ROWS_AT_ONCE = 64
_BYTES_AT_ONCE = 8 << 20  # of a batch, estimated from the mean of its rows
_TIMES, _LEAST = 20, 64 << 20  # a file may expand to so many times its bytes, and to so many bytes in any case
_ROW = 64  # bytes that each row counts in addition to its values
_ROWS = 1 << 18  # rows that any file may have; a larger file may have one per byte, since each row takes time
_MEASURED_FIRST = 16 << 20  # smaller files (bytes) are read twice, so that faults are found before the first record
_MEMORY = 192 << 20  # bytes of memory that a batch of a small file may take


def most_expanded(nbytes: int) -> int:
    """Return how many bytes a file of this size may expand to."""
    return max(_TIMES * nbytes, _LEAST)


def table_rows(
    file: BinaryIO, kind: str, name: str, option: str, columns: Mapping[str, str], remarks: list[str]
) -> Numbered:
    """Yield a record for each row, without its nulls, which stand for missing keys.

    kind: "parquet" or "arrow"; columns: the mapping of --columns; remarks: a list to which notes are added.

    Raises:
        WgradError: pyarrow is not installed or cannot read the file, it expands to too much, or it lacks the columns of
            a record.
    """
    what = {"parquet": "Parquet", "arrow": "Arrow"}[kind]
    try:
        import pyarrow
    except ImportError:
        article = "an" if kind == "arrow" else "a"
        raise WgradError(
            f"{option}: {name} is {article} {what} file, which takes a package: pip install 'wgrad[parquet]'"
        ) from None
    size = os.fstat(file.fileno()).st_size
    memory = max(_MEMORY, 4 * size)
    try:
        table = _within(memory, lambda: _open(file, kind))
        check_columns(table.names, columns, f"{option}: {name}")
        wanted = read_columns(table.names, columns, remarks)
        if size <= _MEASURED_FIRST:
            for _ in _each_within(memory, _bounded(table.batches(wanted), size, f"{option}: {name}")):
                pass
            table = _within(memory, lambda: _open(file, kind))
        batches = _bounded(table.batches(wanted), size, f"{option}: {name}")
        number = 0
        for rows in _each_within(memory, (batch.to_pylist() for batch in batches)):
            for row in rows:
                number += 1
                yield number, without_null(row)
    except MemoryError:
        raise WgradError(
            f"{option}: {name} has {size:,} bytes and takes more than {memory >> 20} MiB of memory to read: write it "
            "as JSON lines"
        ) from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise WgradError(f"{option}: {name} cannot be read as {what}: {reason}: write it again") from error


def _bounded(batches: Iterator[Any], size: int, where: str) -> Iterator[Any]:
    """Yield all batches. Raises WgradError if they are more than a file of `size` bytes may have."""
    left = most = most_expanded(size)
    rows = most_rows = max(size, _ROWS)
    for batch in batches:
        left -= batch.nbytes + _ROW * batch.num_rows
        rows -= batch.num_rows
        if left < 0 or rows < 0:
            what = f"{most >> 20} MiB" if left < 0 else f"{most_rows:,} rows"
            raise WgradError(
                f"{where} has {size:,} bytes and expands to more than {what}: write it as JSON lines, if it is meant so"
            )
        yield batch


def _open(file: BinaryIO, kind: str) -> _Parquet | _Arrow:
    file.seek(0)
    return _Parquet(file) if kind == "parquet" else _Arrow(file)


class _Parquet:
    """A Parquet file. names: of its columns."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow
        import pyarrow.parquet

        usual = pyarrow.default_memory_pool()
        pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others keep some 8 MiB more than they hand out
        try:
            self._file = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 16)
        finally:
            pyarrow.set_memory_pool(usual)
        self.names = list(self._file.schema_arrow.names)

    def batches(self, names: list[str]) -> Iterator[Any]:
        about = self._file.metadata
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        row = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
        rows = min(max(_BYTES_AT_ONCE // max(row, 1), 1), _ROWS_AT_ONCE)
        for batch in self._file.iter_batches(rows, columns=names, use_threads=False):
            yield _without_dictionaries(batch)


class _Arrow:
    """An Arrow file with the interface of `_Parquet`, in the file format or the stream format (of package datasets)."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow.ipc

        starts = file.read(6)
        file.seek(0)
        opened = (pyarrow.ipc.open_file if starts == b"ARROW1" else pyarrow.ipc.open_stream)(file)
        self.names = list(opened.schema.names)
        count = getattr(opened, "num_record_batches", None)  # of the file format alone
        self._batches: Iterator[Any] = iter(opened) if count is None else map(opened.get_batch, range(count))

    def batches(self, names: list[str]) -> Iterator[Any]:
        for batch in self._batches:
            batch.validate(full=True)
            chosen = batch.select(names)
            row = chosen.nbytes // max(chosen.num_rows, 1)
            rows = min(max(_BYTES_AT_ONCE // max(row, 1), 1), _ROWS_AT_ONCE)
            for start in range(0, chosen.num_rows, rows):
                yield _without_dictionaries(chosen.slice(start, rows))


def _without_dictionaries(batch: Any) -> Any:
    """Return a batch whose repeated values are written out, so that its size is known."""
    import pyarrow

    columns = [column.dictionary_decode() if hasattr(column, "dictionary_decode") else column for column in batch]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


# ---- memory --------------------------------------------------------------------------------------
def _each_within(memory: int, steps: Iterator[T]) -> Iterator[T]:
    """Yield an iterator's items, each made with at most `memory` bytes. Raises MemoryError."""
    end = object()
    while (item := _within(memory, lambda: next(steps, end))) is not end:
        yield item


def _within(memory: int, work: Any) -> Any:
    """Call a function that may allocate at most `memory` bytes. Raises MemoryError."""
    with memory_within(memory):
        return work()
