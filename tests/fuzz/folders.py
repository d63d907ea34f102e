"""Data in folders: as the package datasets saves it, as a repository of the hub lies on a disk, with splits and packed
files, and several sources with weights."""

from __future__ import annotations

import gzip
from functools import cache
from random import Random
from typing import Any

from tests.fuzz.base import FINETUNE, PLAIN_LINES, dump, jsonl
from tests.fuzz.case import Case, Content, Files, Special
from tests.fuzz.tables import _arrow, table_files
from tests.fuzz.texts import odd_text
from tests.fuzz.values import mutate_bytes, mutate_json, write_json
from tests.fuzz.words import YAML_LINES, YAML_VALUES

_STATE: dict[str, Any] = {
    "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
    "_fingerprint": "0",
    "_format_columns": None,
    "_format_type": None,
    "_output_all_columns": False,
    "_split": "train",
}
_INFO: dict[str, Any] = {"citation": "", "features": {"text": {"dtype": "string", "_type": "Value"}}, "splits": {}}
_NAMES = (
    "train",
    "test",
    "validation",
    "",
    "a b",
    "../x",
    "a\nb",
    "\x1b[1m",
    "é",
    "x" * 300,
    "dev",
    "train-00000-of-00002",
)
_ENDINGS = (
    ".jsonl",
    ".json",
    ".csv",
    ".parquet",
    ".arrow",
    ".jsonl.gz",
    ".jsonl.zst",
    ".txt",
    ".py",
    ".tsv",
    ".JSONL",
    "",
)
_PATTERNS = (
    "*",
    "data/*",
    "data/train-*",
    "**/*.jsonl",
    "[",
    "[!a]*",
    "?" * 300,
    "*a" * 60,
    "./train*",
    "../*",
    "/etc/passwd",
    "",
)
_YAML = """---
license: mit
configs:
- config_name: {}
  default: {}
  data_files:
  - split: {}
    path: {}
  - split: test
    path: {}
---
# Data
"""


@cache
def _whole(ending: str) -> bytes:
    """Two records in the form that a name ends with."""
    lines = jsonl(PLAIN_LINES)
    if ending in (".csv", ".tsv"):
        return b"prompt,completion\na,b\nc,d\n".replace(b",", b"\t" if ending == ".tsv" else b",")
    if ending in (".parquet", ".arrow"):
        mark = b"PAR1" if ending == ".parquet" else b"ARROW1"
        return next(data for data in table_files() if data.startswith(mark))
    if ending.endswith(".gz"):
        return gzip.compress(lines, mtime=0)
    if ending.endswith(".zst"):
        packed = _arrow().BufferOutputStream()
        with _arrow().CompressedOutputStream(packed, "zstd") as stream:
            stream.write(lines)
        return bytes(packed.getvalue())
    return lines


def _file(rng: Random, ending: str) -> Content:
    chance = rng.random()
    if chance < 0.55:
        return _whole(ending)
    if chance < 0.6:
        return rng.choice((Special("absent"), Special("folder"), Special("fifo"), Special("link", "."), b""))
    if chance < 0.68:  # little that unpacks to much
        text, times = rng.choice(((b"\n", 1 << 16), (b'{"text": "a"}\n', 1 << 14), (b"x", 1 << 18)))
        return gzip.compress(text * times, 1, mtime=0)
    return mutate_bytes(rng, _whole(ending))


def _saved(rng: Random, folder: str) -> Files:
    """Files of `save_to_disk`."""
    name = f"{folder}/data-00000-of-00001.arrow"
    files: Files = {name: _file(rng, ".arrow")}
    for file, value in (("state.json", _STATE), ("dataset_info.json", _INFO)):
        files[f"{folder}/{file}"] = mutate_json(rng, dump(value)) if rng.random() < 0.5 else dump(value)
    return files


def _readme(rng: Random) -> bytes:
    """The front matter that says which files are of which split."""
    if rng.random() < 0.2:
        lines = [f"{name}: {rng.choice(YAML_VALUES)}" for name in ("configs", "license", "dataset_info")]
        lines.insert(rng.randrange(4), rng.choice(YAML_LINES))
        text = "---\n" + "\n".join(lines) + "\n---\n"
    else:
        parts = [
            _written(rng, rng.choice(("default", "en", *_NAMES))),
            _written(rng, True),
            _written(rng, rng.choice(_NAMES)),
            _written(rng, rng.choice(_PATTERNS)),
            _written(rng, rng.choice(_PATTERNS)),
        ]
        text = _YAML.format(*parts)
    data = text.encode("utf-8", "surrogateescape")
    return mutate_bytes(rng, data) if rng.random() < 0.2 else data


def _written(rng: Random, value: Any) -> str:
    if rng.random() < 0.2:
        return str(rng.choice(YAML_VALUES))
    return write_json(rng, value).decode("utf-8", "surrogateescape")


def _repository(rng: Random) -> Files:
    """A data set's repository: files by splits, and mostly a README.md."""
    files: Files = {"folder/README.md": _readme(rng)} if rng.random() < 0.7 else {}
    within = rng.choice(("", "", "data/", "en/"))
    for split in rng.sample(("train", "test", "dev", "train-00000-of-00002", "a"), rng.choice((1, 2, 2, 3))):
        ending = rng.choice(_ENDINGS)
        files[f"folder/{within}{split}{ending}"] = _file(rng, ending)
    return files


def _odd_name(rng: Random) -> str:
    return rng.choice(_NAMES).replace("/", "_")[:200] or "x"


def folder_case(rng: Random, groups: Any) -> Case:
    """A folder of data, or a mix of sources."""
    kind = rng.choice(("saved", "splits", "repository", "repository", "packed", "mix"))
    files: Files = {}
    given = ["folder"]
    if kind == "saved":
        files = _saved(rng, "folder")
    elif kind == "splits":
        names = rng.sample(("train", "test", "validation", "x.y"), rng.choice((1, 2)))
        splits = dump({"splits": names})
        files["folder/dataset_dict.json"] = mutate_json(rng, splits) if rng.random() < 0.5 else splits
        for name in names:
            files |= _saved(rng, f"folder/{name}")
    elif kind == "repository":
        files = _repository(rng)
        if rng.random() < 0.15:
            files[f"folder/{_odd_name(rng)}.jsonl"] = _whole(".jsonl")
    elif kind == "packed":
        ending = rng.choice((".jsonl.gz", ".jsonl.zst", ".csv.gz", ".txt.gz", ".json.gz", ".gz", ".zst"))
        given = [f"data{ending}"]
        files[given[0]] = _file(rng, ".jsonl.zst" if ending.endswith("zst") else ".jsonl.gz")
    else:
        given = [f"data.jsonl={rng.choice(_WEIGHTS)}", f"more.jsonl={rng.choice(_WEIGHTS)}"]
        files["more.jsonl"] = _file(rng, ".jsonl")
    if kind in ("splits", "repository", "saved") and rng.random() < 0.4:
        given = [f"folder:{rng.choice((*_NAMES, odd_text(rng)[:300]))}".replace("\x00", "")]
    return Case(_command(rng, given), ["model", "data"], files)


_WEIGHTS = ("1", "2", "0.5", "0", "-1", "nan", "inf", "1e-300", "1e300", "x", "", "1e999", "9" * 400, "1_0", "1000")


def _command(rng: Random, given: list[str]) -> list[str]:
    if rng.random() < 0.5:
        return ["data", "show", *given, "--model", "model"]
    at = rng.random()
    words = FINETUNE[: FINETUNE.index("--data")] + FINETUNE[FINETUNE.index("--data") + 2 :]
    given = [word for name in given for word in ("--data", name)]
    sources = given if at < 0.8 else ["--data", "data.jsonl", "--eval-data", given[1]]
    return [*words, *sources, "--max-steps", "1", "--max-length", "64", "--batch-size", "2"]
