"""Folders saved by the package datasets (`save_to_disk`): a data set, or several as splits.

Source: its documentation, "Save"; a folder of a data set has `state.json`, which lists its Arrow files, and one of
splits `dataset_dict.json` and a folder for each.
"""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_json
from wgrad.train.files.hub_splits import usual_split
from wgrad.train.files.input_files import one_line

_SPLITS, _STATE = "dataset_dict.json", "state.json"
_AGAIN = "save the data set again with save_to_disk"


class _File(msgspec.Struct):
    filename: Annotated[str, msgspec.Meta(pattern=r"^[^/\\]+\.arrow$")]


class _State(msgspec.Struct):
    files: list[_File] = msgspec.field(name="_data_files")
    indices: list[_File] | None = msgspec.field(default=None, name="_indices_data_files")


class _SplitNames(msgspec.Struct):
    splits: list[Annotated[str, msgspec.Meta(pattern=r"^\w+(\.\w+)*$")]]


def saved_files(path: str, option: str, held_out: bool = False) -> tuple[list[str], tuple[str, ...]] | None:
    """Return the Arrow files of a folder that datasets saved, or of one of its splits, and notes for the user; None if
    the path is not such a folder. Raises WgradError. Arguments as `folder_files`'s."""
    folder, split = path, ""
    if not os.path.exists(path) and ":" in path:
        folder, _, split = path.rpartition(":")
        if not os.path.isfile(os.path.join(folder, _SPLITS)):
            return None
    if os.path.isfile(os.path.join(folder, _SPLITS)):
        names = read_json(os.path.join(folder, _SPLITS), _SplitNames, option, _AGAIN).splits
        chosen = split or (names[0] if len(names) == 1 else usual_split(names, held_out))
        if chosen not in names:
            raise WgradError(
                f"{option}: {folder} has no split {chosen!r}; it has {one_line(', '.join(names)) or 'none'}: name one, "
                f"as {folder}:{next(iter(names), 'train')}"
            )
        others = [name for name in names if name != chosen]
        note = f"note: {folder} is a data set with splits, of which {chosen} is read"
        note += f"; for another give {folder}:{others[0]}" if others else ""
        return _arrow_files(os.path.join(folder, chosen), option), (note,)
    if os.path.isfile(os.path.join(folder, _STATE)):
        return _arrow_files(folder, option), ()
    return None


def _arrow_files(folder: str, option: str) -> list[str]:
    state = read_json(os.path.join(folder, _STATE), _State, option, _AGAIN)
    if state.indices:
        raise WgradError(f"{option}: {folder} is a selection of rows: save it flattened (flatten_indices)")
    if not state.files:
        raise WgradError(f"{option}: {folder} is a data set without rows: give one with at least one example")
    return [os.path.join(folder, file.filename) for file in state.files]
