"""One input of the fuzzer: a command line, and the files that it finds in its folder.

A case is data: what was found once is kept as JSON in tests/fuzz/cases and replayed whatever the mutators become.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPARSE_COUNTS = 1 << 23  # bytes of holes in a file that may be held in memory like any other file's
OUT = "out"  # of `finetune` in every case


@dataclass(frozen=True)
class Special:
    """A path that is no plain file of given bytes.

    kind: absent; folder; fifo; link (argument: its target); sparse (argument: bytes of holes);
    repeat (argument: [text, times, end]); unreadable.
    """

    kind: str
    argument: Any = None


Content = bytes | Special
Files = dict[str, Content]


@dataclass
class Case:
    """A command. argv: its words after `wgrad`, with paths relative to the case's folder. files: contents by path.

    base: groups of base.py's files that lie there too (`files` go over them). encoding: of standard output.
    stdout: where it goes (a path such as /dev/full, 'closed', or '' to read it). around: what surrounds the command,
    by its kind in surroundings.py.
    """

    argv: list[str]
    base: list[str] = field(default_factory=lambda: ["model", "data"])
    files: Files = field(default_factory=dict)
    stdin: bytes = b""
    encoding: str = "utf-8"
    stdout: str = ""
    around: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    note: str = ""

    def input_bytes(self) -> int:
        """Return the bytes of a case's changed files; holes count at most SPARSE_COUNTS."""
        total = len(self.stdin) + sum(len(a) for a in self.argv)
        for content in self.files.values():
            if isinstance(content, bytes):
                total += len(content)
            elif content.kind == "repeat":
                text, times, end = content.argument
                total += len(text.encode()) * times + len(end.encode())
            elif content.kind == "sparse":
                total += min(content.argument, SPARSE_COUNTS)
        return total


def write_files(folder: Path, files: Files) -> None:
    """Put the files of a case into its folder."""
    for name, content in files.items():
        path = folder / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            _write_special(path, content)


def _write_special(path: Path, special: Special) -> None:
    path.unlink(missing_ok=True)
    if special.kind == "folder":
        path.mkdir()
    elif special.kind == "fifo":
        os.mkfifo(path)
    elif special.kind == "link":
        path.symlink_to(special.argument)
    elif special.kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(special.argument)
    elif special.kind == "repeat":
        text, times, end = special.argument
        path.write_bytes(text.encode() * times + end.encode())
    elif special.kind == "unreadable":
        path.write_bytes(b"")
        path.chmod(0)
    elif special.kind != "absent":
        raise ValueError(f"unknown kind of file {special.kind!r}")


# ---- as JSON -----------------------------------------------------------------------------------
def to_json(case: Case) -> str:
    value = dict(vars(case), stdin=_encode(case.stdin), files={k: _encode(v) for k, v in case.files.items()})
    return json.dumps(value, indent=1) + "\n"


def from_json(text: str) -> Case:
    value = json.loads(text)
    files = {name: _decode(v) for name, v in value.pop("files").items()}
    stdin = _decode(value.pop("stdin"))
    assert isinstance(stdin, bytes)
    return Case(**value, files=files, stdin=stdin)


def _encode(content: Content) -> dict[str, Any]:
    if isinstance(content, Special):
        return {content.kind: content.argument}
    try:
        text = content.decode("utf-8")
        if len(text) < 4000:
            return {"text": text}
    except UnicodeDecodeError:
        pass
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _decode(value: dict[str, Any]) -> Content:
    ((kind, argument),) = value.items()
    if kind == "text":
        return argument.encode("utf-8")
    if kind == "zlib":
        return zlib.decompress(base64.b64decode(argument))
    return Special(kind, argument)
