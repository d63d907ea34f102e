"""Records that a Python caller gives in place of a data file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.data.data_files import DataFile
from wgrad.train.data.records import Numbered, Record, without_null

PLACEHOLDERS = {"data": "<data>", "eval_data": "<eval_data>"}  # what stands for them in the options of a run
Records = Iterable[Mapping[str, Any]]  # a list, a generator, a data set of the package datasets


@dataclass(frozen=True)
class GivenRecords(DataFile):
    """As an open file of records, which it is used as. name: what stands for it in messages."""

    values: Records = ()

    def records(self) -> Numbered:
        """Without what is null in records of a table: there each has every column."""
        table = hasattr(self.values, "column_names")
        for number, value in enumerate(self.values, start=1):
            yield number, _record(value, table)


def given_records(name: str, option: str, values: Records) -> GivenRecords:
    return GivenRecords(io.BytesIO(), name, option, "lines", (), values=values)


def refuse_placeholder(path: str, option: str) -> None:
    """WgradError where what stands for records is all that there is of them."""
    for name, stands in PLACEHOLDERS.items():
        if path == stands:
            raise WgradError(
                f"{option}: this run had records of a Python caller: give them again (wgrad.finetune(..., {name}=...))"
            )


def _record(value: Any, table: bool) -> Record:
    if not isinstance(value, Mapping):
        return f"expected a mapping such as {{'text': ...}}, got {type(value).__name__}: give one for each record"
    return without_null(dict(value)) if table else dict(value)
