"""Records that a Python caller gives instead of a data file: an iterable, or a table of pandas, polars, pyarrow or
datasets. Tables are recognized by their methods, so that none of these packages is imported."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.data_files import DataFile
from wgrad.train.data.records import Numbered, Record, without_null
from wgrad.train.files.hub_splits import usual_split

PLACEHOLDERS = {"data": "<data>", "eval_data": "<eval_data>"}  # their placeholders in the options of a run
Records = Iterable[Mapping[str, Any]]
_NO_SETS = (str, bytes, Mapping)  # a split of splits is no form of any library


def records_of(value: Any, name: str) -> Records:
    """Return the records of the argument `name`.

    Raises:
        WgradError: the value is neither an iterable of records nor a known table.
    """
    if isinstance(value, Mapping):
        value = _split_of(value, name)
    if hasattr(value, "itertuples") and hasattr(value, "columns"):  # pandas
        columns = [str(column) for column in value.columns]
        if len(set(columns)) < len(columns):
            raise WgradError(f"{name}: two columns of the table have one name: rename or remove one")
        return _Rows(lambda: (dict(zip(columns, row)) for row in value.itertuples(index=False, name=None)))
    if hasattr(value, "iter_rows") and hasattr(value, "columns"):  # polars
        return _Rows(lambda: value.iter_rows(named=True))
    if hasattr(value, "to_batches"):  # pyarrow
        return _Rows(lambda: (row for batch in value.to_batches(max_chunksize=64) for row in batch.to_pylist()))
    if hasattr(value, "collect") and hasattr(value, "lazy"):
        raise WgradError(f"{name}: a lazy table has no rows yet: give what its collect() returns")
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise WgradError(
            f"{name}: expected a path or an iterable of records, got {type(value).__name__}: give a list such as "
            "[{'text': '...'}]"
        )
    return _Rows(lambda: iter(value)) if hasattr(value, "column_names") else value  # datasets


def _split_of(splits: Mapping[str, Any], name: str) -> Any:
    """Choose the data set to train on, or for `eval_data` to evaluate on, from several by name."""
    no_sets = [split for split in splits.values() if not isinstance(split, Iterable) or isinstance(split, _NO_SETS)]
    if not splits or no_sets:
        raise WgradError(
            f"{name}: expected a path or an iterable of records, got dict: give a list such as [{{'text': '...'}}]"
        )
    chosen = next(iter(splits)) if len(splits) == 1 else usual_split([*map(str, splits)], name == "eval_data")
    if chosen not in splits:
        raise WgradError(f"{name}: has the splits {', '.join(map(str, splits))[:200]}: give one, as {name}=splits[...]")
    return splits[chosen]


class _Rows:
    """The rows of a table, which can be iterated over several times."""

    def __init__(self, rows: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self._rows()


@dataclass(frozen=True)
class GivenRecords(DataFile):
    """Given records, used like an open file of records. name: their placeholder in messages."""

    values: Records = ()

    def records(self) -> Numbered:
        """Yield numbered records, those of a table without nulls, since each row has every column."""
        table = isinstance(self.values, _Rows)
        for number, value in enumerate(self.values, start=1):
            yield number, _record(value, table)


def given_records(name: str, option: str, values: Records) -> GivenRecords:
    return GivenRecords(io.BytesIO(), name, option, "lines", (), values=values)


def refuse_placeholder(path: str, option: str) -> None:
    """Raise WgradError if a path is a placeholder of records that were not given again."""
    for name, stands in PLACEHOLDERS.items():
        if path == stands:
            raise WgradError(
                f"{option}: this run had records of a Python caller: give them again (wgrad.finetune(..., {name}=...))"
            )


def _record(value: Any, table: bool) -> Record:
    if not isinstance(value, Mapping):
        return f"expected a mapping such as {{'text': ...}}, got {type(value).__name__}: give one for each record"
    record: dict[str, Any] = _plain(value)
    return without_null(record) if table else record


def _plain(cell: Any) -> Any:
    """Return a cell as a JSON value; None for a missing one."""
    if isinstance(cell, Mapping):
        return {str(key): _plain(part) for key, part in cell.items()}
    if hasattr(cell, "tolist"):  # arrays and numbers of NumPy
        cell = cell.tolist()
    if isinstance(cell, (list, tuple)):
        return [_plain(part) for part in cell]
    if isinstance(cell, float) and math.isnan(cell):
        return None
    return None if type(cell).__name__ in ("NAType", "NaTType") else cell  # pandas'
