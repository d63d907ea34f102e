"""Choice of a split's files in a data set's repository: by the `configs` of its README.md, else by their names;
and which of the Parquet files that the hub itself makes of it.

Source: the hub's documentation of data sets, "Data files configuration" (the README's front matter; the words of
splits in names), and of its dataset viewer, "List Parquet files" (the branch `refs/convert/parquet`). Only files of
data count: a script of the repository is never run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from wgrad.device.errors import WgradError

_PLAIN = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
ENDINGS = (".parquet", ".arrow", *_PLAIN, *(plain + packed for plain in _PLAIN for packed in (".gz", ".zst")))
_ABOUT = ("dataset_infos.json", "dataset_dict.json", "state.json", "dataset_info.json")  # says something of the data
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DEFAULT, _PARTIAL = "default", "partial-"
_LONGEST = 1 << 20  # characters of front matter: PyYAML reads some 300 kB a second
_SHARD = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})((?:\.\w+)+)")


def files_of_split(
    names: Sequence[str], readme: str, config: str, split: str, where: str, held_out: bool = False
) -> tuple[str, list[str]]:
    """Return a split and its files out of a repository's, in order.

    Args:
        readme: text of README.md.
        config: "" for the default.
        split: "" for `usual_split`, which `held_out` is for.
        where: begins each error.

    Raises:
        WgradError: the split has no files.
    """
    data = [n for n in sorted(names) if n.lower().endswith(ENDINGS) and n.rpartition("/")[2] not in _ABOUT]
    if not data:
        scripts = [name for name in names if name.endswith(".py")]
        why = f" (its script {scripts[0]} is not run)" if scripts else ""
        raise WgradError(f"{where}: has no Parquet, JSON or CSV files{why}: take another data set, or save it as files")
    splits = _of_readme(data, readme, config, where)
    if splits is None:
        if config:
            raise WgradError(f"{where}: its README.md names no configurations: leave {config}/ out")
        splits = _by_names(data)
    return _of_split(splits, split, () if config else _configs(readme), where, held_out)


def files_of_conversion(
    names: Sequence[str], config: str, split: str, where: str, held_out: bool = False
) -> tuple[str, list[str], bool]:
    """Return a split and its files out of the hub's conversion (CONFIGURATION/SPLIT/0000.parquet), in order, and
    whether they are only its beginning: of large data sets the hub converts no more. Arguments as `files_of_split`'s.

    Raises:
        WgradError: the split has no files.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        match name.split("/"):
            case [of_config, of_split, file] if file.endswith(".parquet"):
                found.setdefault(of_config, {}).setdefault(of_split.removeprefix(_PARTIAL), []).append(name)
    if not found:
        raise WgradError(f"{where}: the Hub's own conversion to Parquet is empty: take another data set")
    default = [_DEFAULT] if _DEFAULT in found else list(found)
    splits = found[_named(config, default, found, where)]
    split, files = _of_split(splits, split, () if config else found, where, held_out)
    return split, files, any(f"/{_PARTIAL}" in name for name in files)


def usual_split(splits: Collection[str], held_out: bool) -> str:
    """Return the split to read if none is named: "train"; for held-out data a split for validation, else for tests."""
    for kind in ("validation", "test") if held_out else ():
        # The name itself comes before others of its kind, such as test_sft.
        for name in sorted(splits, key=lambda name: name != kind):
            if split_of(f"{name}.") == kind:
                return name
    return "train"


def _of_split(
    splits: Mapping[str, list[str]], split: str, configs: Collection[str], where: str, held_out: bool
) -> tuple[str, list[str]]:
    found = {name: files for name, files in splits.items() if files}
    split = split or usual_split(found, held_out)
    if split not in found:
        meant = f", or {split}/{next(iter(found), 'train')} for its configuration" if split in configs else ""
        raise WgradError(
            f"{where}: has no split {split!r} of data files; it has {', '.join(found) or 'none'}: name one{meant}"
        )
    return split, found[split]


def _named(config: str, default: Sequence[str], configs: Collection[str], where: str) -> str:
    """Return the configuration to use. default: candidates if none is asked for."""
    if not config and len(default) > 1:
        raise WgradError(f"{where}: has several configurations ({', '.join(configs)}): name one, as ID:NAME/train")
    name = config or default[0]
    if name not in configs:
        raise WgradError(f"{where}: has no configuration {name!r}; it has {', '.join(configs)}: name one of them")
    return name


def missing_shards(names: Sequence[str]) -> bool:
    """Return whether `names` lack a shard by their numbering, or include a file without numbering."""
    parts = [_SHARD.fullmatch(name) for name in names]
    groups: dict[tuple[str, ...], set[int]] = {}
    for part in parts:
        if part is None:
            return True
        groups.setdefault((part[1], part[3], part[4]), set()).add(int(part[2]))
    return any(len(numbers) != int(key[1]) or max(numbers) >= int(key[1]) for key, numbers in groups.items())


def _of_readme(data: Sequence[str], readme: str, config: str, where: str) -> dict[str, list[str]] | None:
    """Return the files by split; None if the README does not list them."""
    configs = _configs(readme)
    if not configs:
        return None
    default = [n for n, c in configs.items() if c.get("default") is True or n == _DEFAULT] or list(configs)
    files = configs[_named(config, default, configs, where)].get("data_files")
    if files is None:
        return None
    if isinstance(files, dict):
        entries = [{"split": name, "path": paths} for name, paths in files.items()]
    else:
        entries = files if isinstance(files, list) and all(isinstance(e, dict) for e in files) else [{"path": files}]
    found: dict[str, list[str]] = {}
    for entry in entries:
        paths = entry.get("path")
        patterns = [p for p in (paths if isinstance(paths, list) else [paths]) if isinstance(p, str)]
        chosen = [name for name in data if any(_fits(name, pattern) for pattern in patterns)]
        found.setdefault(str(entry.get("split", "train")), []).extend(chosen)
    return found


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern.removeprefix("./").replace("**/", "*"))


def _configs(readme: str) -> dict[str, dict[str, Any]]:
    parts = readme.split("---", 2)
    if len(parts) < 3 or parts[0].strip() or len(parts[1]) > _LONGEST:
        return {}
    try:
        value = yaml.safe_load(parts[1])
    except Exception:  # PyYAML's constructors raise any error
        return {}
    entries = value.get("configs") if isinstance(value, dict) else None
    entries = [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
    return {str(e.get("config_name", _DEFAULT)): e for e in entries}


def _by_names(data: Sequence[str]) -> dict[str, list[str]]:
    """Return the files by split, from the words in their paths; if no path has one, all are "train"."""
    found: dict[str, list[str]] = {split: [] for split in _WORDS}
    for name in data:
        if split := split_of(name):
            found[split].append(name)
    return found if any(found.values()) else {"train": list(data)}


def split_of(name: str) -> str:
    """The split that a file's path names by one of its words; "" for none."""
    words = set(re.split(r"[^a-z]+", name.lower().rpartition(".")[0]))
    return next((split for split, known in _WORDS.items() if words & set(known)), "")
