"""Parts of a GGUF model that is split over several files: their names, and checks of their metadata.

Source: github.com/ggml-org/llama.cpp, src/llama-model-loader.cpp (split.no, split.count, split.tensors.count).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show
from wgrad.train.files.input_files import exists, one_line

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_FORM = "NAME-00001-of-00003.gguf"


def is_split(fields: Mapping[str, Any]) -> bool:
    """Return whether the metadata of a file says that it is a part."""
    return fields.get("split.count", 1) not in (0, 1)


def all_parts(path: Path, count: Any, source: str) -> list[Path]:
    """Return the files of a split model in order. path: any part; count: the number of parts by its metadata.

    Raises:
        WgradError: a part is missing, or the name is not that of a part.
    """
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise WgradError(
            f"{source}: {path} is one of the {show(count)} parts of a split model: name them as llama.cpp does, {_FORM}"
        )
    parts = [path.with_name(part_name(named[1], number, count)) for number in range(1, count + 1)]
    for number, part in enumerate(parts, start=1):
        if not exists(part, source):
            raise WgradError(
                f"{source}: {path}: part {number} of {count} is missing ({one_line(part.name)}): put it next to the "
                "others"
            )
    return parts


def part_name(stem: str, number: int, count: int) -> str:
    """Return the name of a part's file. number: from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def check_part(path: Path, fields: Mapping[str, Any], number: int, count: int, source: str) -> None:
    """Raise WgradError if the metadata of a file is not that of this part. number: from 1."""
    for key, wanted in (("split.no", number - 1), ("split.count", count)):
        if fields.get(key) != wanted:
            raise WgradError(
                f"{source}: {path}: {key} must be {wanted} by its name, got {show(fields.get(key))}: take all parts "
                "from one model"
            )


def check_tensors(path: Path, found: int, fields: Mapping[str, Any], source: str) -> None:
    """Raise WgradError if the parts together do not have as many tensors as the first announces."""
    if (wanted := fields.get("split.tensors.count", found)) != found:
        raise WgradError(
            f"{source}: {path}: split.tensors.count is {show(wanted)}, but the parts have {found} tensors: take all "
            "parts from one model"
        )


def linked_file(path: Path) -> Path:
    """Return the GGUF file that a link stands for, by the name that its user knows; without a link the path."""
    target = Path(os.readlink(path)) if path.is_symlink() else path
    return target if target.is_absolute() and target.suffix == path.suffix else path


def one_of_each(files: Iterable[Path]) -> list[Path]:
    """Return one file of each model; for a split one the first part that exists."""
    found: dict[str, Path] = {}
    for path in sorted(files):
        named = _PART.fullmatch(path.name)
        found.setdefault(os.fspath(path) if named is None else f"{named[1]}\0{named[3]}", path)
    return list(found.values())
