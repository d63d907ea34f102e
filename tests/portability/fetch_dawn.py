"""Fetch what package-lock.json names into node_modules, without npm: `python tests/portability/fetch_dawn.py`.

Debian's npm is 380 packages, which take two minutes to install; the tests need it for four archives. Their digests are
those of package-lock.json. $NPM_CONFIG_REGISTRY names another registry, as it does for npm.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REGISTRY = "https://registry.npmjs.org"


def installed_version(folder: Path) -> str | None:
    note = folder / "package.json"
    return json.loads(note.read_text())["version"] if note.exists() else None


def fetch(name: str, package: dict[str, Any]) -> bytes:
    """The archive of a package.

    Raises:
        ValueError: its digest is not that of the lock file.
    """
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or os.environ.get("npm_config_registry") or REGISTRY
    url = f"{registry.rstrip('/')}/{name}/-/{name.rpartition('/')[2]}-{package['version']}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        data: bytes = answer.read()
    kind, _, digest = package["integrity"].partition("-")
    if hashlib.new(kind, data).digest() != base64.b64decode(digest):
        raise ValueError(f"{url} has another digest than package-lock.json says")
    return data


def unpack(data: bytes, folder: Path) -> None:
    """The archive's only folder becomes `folder`, whole or not at all."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.2 has none
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part, **options)
    (inside,) = part.iterdir()
    shutil.rmtree(folder, ignore_errors=True)
    inside.rename(folder)
    part.rmdir()


def main() -> int:
    packages = json.loads((HERE / "package-lock.json").read_text())["packages"]
    try:
        for place, package in packages.items():
            if place and installed_version(folder := HERE / place) != package["version"]:
                unpack(fetch(place.removeprefix("node_modules/"), package), folder)
    except (OSError, ValueError) as error:
        print(f"fetch_dawn.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
