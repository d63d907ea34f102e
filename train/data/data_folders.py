"""Folders of data files: choosing the files to read, with notes for the user about the others.

A folder may be a downloaded data set of the Hugging Face Hub, or have files named after splits. Then only one split is
read, as the package datasets does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.files.hub_splits import ENDINGS, files_of_split, split_of
from wgrad.train.files.input_files import reading

_ABOUT = re.compile(r"readme|licen[sc]e|notice|(dataset_infos?|state)\.json$|.*\.lock$", re.IGNORECASE)
_README = "README.md"
_LONGEST = 1 << 20  # characters of it that are read
_MOST = 10_000  # files


def is_split_of_folder(path: str) -> bool:
    """Return whether a path is FOLDER:SPLIT of an existing folder."""
    return ":" in path and not os.path.exists(path) and os.path.isdir(path.rpartition(":")[0])


def folder_files(path: str, option: str, held_out: bool = False) -> tuple[list[str], tuple[str, ...]]:
    """Return the files of a folder by name, without hidden ones, or of one of its splits; and notes for the user.

    Args:
        path: FOLDER, or FOLDER:SPLIT.
        option: the option that names it.
        held_out: without a split, prefer one for validation or tests (`usual_split`).

    Raises:
        WgradError: there are no files, or there are other folders among them.
    """
    folder, split = path, ""
    if is_split_of_folder(path):
        folder, _, split = path.rpartition(":")
    with reading(folder, option):
        found = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        within = [name for name in found if os.path.isdir(os.path.join(folder, name))]
        if not found:
            raise WgradError(f"{option}: {folder} is a folder without files: give one with data in it")
        if within and _README not in found and found != ["data"]:
            raise WgradError(
                f"{option}: {os.path.join(folder, within[0])} is a folder within {folder}: move its files up, or "
                "elsewhere"
            )
        if within:
            found = _walk(folder, option)
    data = [name for name in found if name.lower().endswith(ENDINGS) and not _is_about(name)]
    if data:
        found = [name for name in found if not _is_about(name)]
    splits = list(dict.fromkeys(map(split_of, data)))
    are_named = len(data) == len(found) and "" not in splits and "train" in splits and len(splits) > 1
    if not (within or split or are_named):
        return [os.path.join(folder, name) for name in found], ()
    split, chosen = files_of_split(found, _readme(folder, option), "", split, f"{option}: {folder}", held_out)
    others = [other for other in splits if other not in ("", split)]
    note = f"note: {option} reads {counted(len(chosen), 'file')} of the split {split} in {folder}"
    note += f"; for another split give {folder}:{others[0]}" if others else ""
    return [os.path.join(folder, name) for name in chosen], (note,)


def _is_about(name: str) -> bool:
    """Return whether a file only describes data (README, LICENSE and others)."""
    return _ABOUT.match(name.rpartition("/")[2]) is not None


def _walk(folder: str, option: str) -> list[str]:
    """Return the paths of all files below a folder, with slashes. Raises WgradError if they are too many."""
    found: list[str] = []
    for place, within, names in os.walk(folder):
        within[:] = sorted(name for name in within if not name.startswith("."))
        here = Path(place).relative_to(folder)
        found += [(here / name).as_posix() for name in sorted(names) if not name.startswith(".")]
        if len(found) > _MOST:
            raise WgradError(f"{option}: {folder} has more than {_MOST:,} files: name those that are meant")
    return sorted(found)


def _readme(folder: str, option: str) -> str:
    path = os.path.join(folder, _README)
    if not os.path.isfile(path):
        return ""
    with reading(path, option), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_LONGEST)
