"""`wgrad cache`: what --stream-weights keeps on the disk, and how it goes."""

from __future__ import annotations

from collections.abc import Callable

from wgrad.device.files import remove_leftovers, writing
from wgrad.train.model.load_streamed import cached_files, cached_weights
from wgrad.train.terminal.output import say
from wgrad.train.terminal.progress import size


def _total() -> str:
    files = cached_files()
    return f"{len(files)} base model{'s' * (len(files) != 1)}, {size(sum(path.stat().st_size for path in files))}"


def list_cache() -> int:
    say(f"quantised weights in {cached_weights()}: {_total()}")
    return 0


def clear_cache() -> int:
    removed = _total()
    remove_leftovers(cached_weights())
    with writing(cached_weights()):
        for path in cached_files():
            path.unlink()
    say(f"removed from {cached_weights()}: {removed}")
    return 0


COMMANDS: dict[str, Callable[[], int]] = {"list": list_cache, "clear": clear_cache}
