"""Convert the data sets of configurations of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_DATA_FILES = {".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow"}


class Left(Exception):
    """An option that has no counterpart, and why. nearest: options that are taken in its place, though they differ."""

    def __init__(self, why: str, nearest: Mapping[str, Any] = {}) -> None:
        super().__init__(why)
        self.nearest = nearest


def data_sets(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    """Convert axolotl's list of data sets."""
    paths: list[str] = []
    columns: dict[str, str] = {}
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            paths.append(one)
            continue
        files = one.get("data_files") or ()
        files = [files] if isinstance(files, str) else list(files)
        paths += files or [_path_of(one)]
        for theirs, ours in (("field_messages", "messages"), ("field", "text"), ("field_instruction", "instruction"),
                             ("field_input", "input"), ("field_output", "output")):  # fmt: skip
            if one.get(theirs) and one[theirs] != ours:
                columns[ours] = one[theirs]
    found: dict[str, Any] = {"data": paths}
    if columns:
        found["columns"] = [f"{ours}={theirs}" for ours, theirs in columns.items()]
    return found


def _path_of(one: Mapping[str, Any]) -> str:
    """Return a file, or a data set of the hub with its split."""
    path, split = str(one.get("path")), one.get("split")
    is_file = bool(one.get("ds_type")) or PurePath(path).suffix in _DATA_FILES
    return f"{path}:{split}" if split and not is_file and path.count("/") == 1 else path


def test_data(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"eval_data": data_sets(value, values)["data"]}


def data_set(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert TRL's data set id with its split. Left: it is one of LLaMA-Factory's names in dataset_info.json."""
    if "dataset_name" in values or "finetuning_type" not in values and "stage" not in values:
        split = values.get("dataset_train_split")
        return {"data": [f"{value}:{split}" if split and isinstance(value, str) else value]}
    raise Left("it is a name in dataset_info.json: give its file as data")
