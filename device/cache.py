"""Folders of the user's cache, and what is kept there: it may be deleted at any time, and is made again."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

from wgrad.device.files import replacing


def cache_folder(name: str) -> Path:
    """wgrad/`name` in the user's cache ($XDG_CACHE_HOME or ~/.cache on Linux, ~/Library/Caches on macOS, %LOCALAPPDATA%
    on Windows); it need not exist."""
    return user_cache_path("wgrad", appauthor=False, opinion=False) / name


def keep(path: Path, data: bytes) -> None:
    """Replace the contents of `path` atomically; its folder is made where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(data)
