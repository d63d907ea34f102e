"""`wgrad cache`: what --stream-weights, GGUF files as base models and --data - keep on the disk, and how it goes."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from wgrad.device.files import remove_leftovers, writing
from wgrad.train.data.standard_input import copied_files, copies
from wgrad.train.model.load_streamed import cached_files, cached_weights
from wgrad.train.options.option_text import size
from wgrad.train.step.find_model import described, described_files
from wgrad.train.terminal.output import say


def _total() -> str:
    files = cached_files()
    return f"{len(files)} base model{'s' * (len(files) != 1)}, {size(sum(path.stat().st_size for path in files))}"


def _described() -> str:
    folders = described_files()
    total = sum(path.stat().st_size for folder in folders for path in folder.iterdir() if not path.is_symlink())
    return f"{len(folders)} GGUF file{'s' * (len(folders) != 1)}, {size(total)}"


def _copied() -> str:
    files = copied_files()
    return f"{len(files)} cop{'ies' if len(files) != 1 else 'y'}, {size(sum(path.stat().st_size for path in files))}"


def list_cache() -> int:
    say(f"quantised weights in {cached_weights()}: {_total()}")
    say(f"configurations and tokenizers in {described()}: {_described()}")
    say(f"standard input of runs in {copies()}: {_copied()}")
    return 0


def clear_cache() -> int:
    removed = _total()
    remove_leftovers(cached_weights())
    with writing(cached_weights()):
        for path in cached_files():
            path.unlink()
    say(f"removed from {cached_weights()}: {removed}")
    removed = _described()
    with writing(described()):
        for folder in described_files():
            shutil.rmtree(folder)
    say(f"removed from {described()}: {removed}")
    removed = _copied()
    remove_leftovers(copies())
    with writing(copies()):
        for path in copied_files():
            path.unlink()
    say(f"removed from {copies()}: {removed}")
    return 0


COMMANDS: dict[str, Callable[[], int]] = {"list": list_cache, "clear": clear_cache}
