"""`wgrad cache`: list or remove what --stream-weights, GGUF base models and --data - keep on the disk."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from wgrad.device.files import remove_leftovers, writing
from wgrad.device.shown import counted
from wgrad.train.data.standard_input import copied_files, copies
from wgrad.train.model.load_streamed import cached_files, cached_weights
from wgrad.train.options.option_text import size
from wgrad.train.step.find_model import described, described_files
from wgrad.train.terminal.output import say


class _Kind(NamedTuple):
    """A kind of cached files or folders, in a folder of its own."""

    contents: str
    folder: Callable[[], Path]
    entries: Callable[[], list[Path]]
    one: str
    many: str

    def total(self) -> str:
        """Return the number of entries and their size. Links to the user's files do not count."""
        entries = self.entries()
        files = [path for entry in entries for path in _files(entry)]
        return f"{counted(len(entries), self.one, self.many)}, {size(sum(map(_nbytes, files)))}"

    def clear(self) -> None:
        """Remove all entries, and what interrupted writes have left."""
        remove_leftovers(self.folder())
        with writing(self.folder()):
            for path in self.entries():
                with suppress(FileNotFoundError):  # another process has removed it
                    if path.is_dir():
                        shutil.rmtree(path)
                    else:
                        path.unlink()


def _files(entry: Path) -> list[Path]:
    """Return the files of an entry; none if another process has removed it."""
    with suppress(FileNotFoundError):
        return list(entry.iterdir()) if entry.is_dir() else [entry]
    return []


def _nbytes(path: Path) -> int:
    """Return a file's size; 0 for a link, or if another process has removed the file."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        return 0 if stat.S_ISLNK(found.st_mode) else found.st_size
    return 0


_KINDS = (
    _Kind("quantized weights", cached_weights, cached_files, "base model", "base models"),
    _Kind("configurations and tokenizers", described, described_files, "GGUF file", "GGUF files"),
    _Kind("standard input of runs", copies, copied_files, "copy", "copies"),
)


def list_cache() -> int:
    for kind in _KINDS:
        say(f"{kind.contents} in {kind.folder()}: {kind.total()}")
    return 0


def clear_cache() -> int:
    for kind in _KINDS:
        removed = kind.total()
        kind.clear()
        say(f"removed from {kind.folder()}: {removed}")
    return 0


COMMANDS: dict[str, Callable[[], int]] = {"list": list_cache, "clear": clear_cache}
