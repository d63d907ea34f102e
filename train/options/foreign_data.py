"""Convert the data sets of configurations of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_DATA_FILES = {".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow"}


# Of axolotl's data sets: keys that name columns, and our names of these; other keys that are read or without effect;
# the types whose records wgrad tells by their columns.
_COLUMNS = {"field_messages": "messages", "field": "text", "field_instruction": "instruction", "field_input": "input",
            "field_output": "output", "field_system": "system"}  # fmt: skip
_KEYS = {"path", "data_files", "ds_type", "conversation", "trust_remote_code", "preprocess_shards"}
_TYPES = {None, "alpaca", "completion", "pretrain", "sharegpt", "chat_template", "chat_template.default",
          *(f"{template}.{layout}" for template in ("chat_template", "chatml", "llama3")
            for layout in ("argilla", "argilla_chat", "intel", "icr", "prompt_pairs", "ultra"))}  # fmt: skip


class Left(Exception):
    """An option that has no counterpart, and why. nearest: options that are taken in its place, though they differ."""

    def __init__(self, why: str, nearest: Mapping[str, Any] = {}) -> None:
        super().__init__(why)
        self.nearest = nearest


def data_sets(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    """Convert axolotl's list of data sets."""
    paths: list[str] = []
    columns: dict[str, str] = {}
    unread: dict[str, None] = {}
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, str):
            paths.append(one)
            continue
        files = one.get("data_files") or ()
        files = [files] if isinstance(files, str) else list(files)
        paths += files or [_path_of(one)]
        kind = one.get("type")
        for keys in (one, kind if isinstance(kind, dict) else {}):
            columns |= {ours: keys[key] for key, ours in _COLUMNS.items() if keys.get(key) and keys[key] != ours}
            unread |= dict.fromkeys(key for key in keys if not _is_read(key, keys[key]))
    found: dict[str, Any] = {"data": paths}
    if columns:
        found["columns"] = [f"{ours}={theirs}" for ours, theirs in columns.items()]
    if unread:
        raise Left(f"read without {', '.join(unread)}: wgrad data show tells what a run learns", found)
    return found


def _is_read(key: str, value: Any) -> bool:
    """Return whether a key of a data set means what wgrad does with its records."""
    if key in ("message_property_mappings", "message_field_role", "message_field_content"):
        names = {*value.values()} if isinstance(value, dict) else {value}
        return names <= {"role", "from", "content", "value"}
    if key == "type":
        return isinstance(value, dict) or value in _TYPES
    if key == "split":
        return not set(str(value)) & {"[", "+"}
    if key == "roles_to_train":
        return value in (["assistant"], ["gpt"])
    plain = {"train_on_eos": "turn", "chat_template": "tokenizer_default"}
    return key in _COLUMNS or key in _KEYS or value in (None, "", plain.get(key))


def _path_of(one: Mapping[str, Any]) -> str:
    """Return a file, or a data set of the hub with its split, whole and the first of several."""
    path, split = str(one.get("path")), re.split(r"[\[+]", str(one.get("split") or ""))[0]
    is_file = bool(one.get("ds_type")) or PurePath(path).suffix in _DATA_FILES
    return f"{path}:{split}" if split and not is_file and path.count("/") == 1 else path


def test_data(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"eval_data": data_sets(value, values)["data"]}
    except Left as left:
        raise Left(str(left), {"eval_data": left.nearest["data"]}) from None


def data_set(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert TRL's data set id with its split. Left: it is one of LLaMA-Factory's names in dataset_info.json."""
    if "dataset_name" in values or "finetuning_type" not in values and "stage" not in values:
        split = values.get("dataset_train_split")
        return {"data": [f"{value}:{split}" if split and isinstance(value, str) else value]}
    raise Left("it is a name in dataset_info.json: give its file as data")
