"""Hostile surroundings of a command: permissions, variables, limits of the system, closed streams, no working folder.

Only the surroundings are hostile: every file and option is sound. Linux only.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NoReturn
from unittest.mock import patch

from tests.fuzz.base import EXPORT, FINETUNE, GENERATE, MERGE, RESUME, SAMPLING
from tests.fuzz.case import Case, Files
from tests.fuzz.tools import EXPORT as EXPORT_OLLAMA
from tests.fuzz.words import LONG
from tests.modes import modes_count

HERE = "{here}"  # the case's folder, in words and variables
_MODEL = ["--model", "model", "--device", "cpu"]
_TINY = ["--max-length", "16", "--batch-size", "1"]


def _without(line: list[str], option: str) -> list[str]:
    at = line.index(option)
    return line[:at] + line[at + 2 :]


def _held_out(line: list[str]) -> list[str]:
    return [*_without(line, "--eval-fraction"), "--eval-data", "eval.jsonl"]


# Sound lines, one of which meets what surrounds it.
LINES: tuple[list[str], ...] = (
    [*FINETUNE, "--max-steps", "1"],
    [*SAMPLING, "--max-steps", "1"],
    [*_held_out(FINETUNE), "--max-steps", "1", "--config", "run.yaml"],
    [*FINETUNE, "--max-steps", "1", "--data", "folder"],
    [*_without(FINETUNE, "--lora-r"), "--max-steps", "1", "--adapter", "finished"],
    [*_without(FINETUNE, "--lora-r"), "--max-steps", "1", "--full"],
    [*_without(_held_out(FINETUNE), "--save-steps"), "--max-steps", "1", "--lr-sweep", "1e-4,1e-3"],
    [*RESUME, "--max-steps", "3"],
    [*RESUME, "--max-steps", "3"],
    ["sweep", "--vary", "seed=1,2", *_held_out(FINETUNE)[1:], "--max-steps", "1"],
    [*GENERATE, "x"],
    [*GENERATE, "x", "--adapter", "finished"],
    [*GENERATE, "x", "--chat", "--chat-template", "mine.jinja"],
    [*GENERATE[:1], *_MODEL, "--max-new-tokens", "1", "--prompts", "prompts.jsonl", "--out", "answers.jsonl"],
    ["generate", "--model", "whole.gguf", "--device", "cpu", "--max-new-tokens", "1", "--prompt", "-"],
    ["chat", *_MODEL, "--max-new-tokens", "1", "--adapter", "finished"],
    ["serve", *_MODEL, "--port", "0", "--adapter", "finished", "--context", "32"],
    ["watch", "out", "finished", "--port", "0"],
    ["studio", ".", "--port", "0"],
    ["eval", *_MODEL, *_TINY, "--data", "eval.jsonl", "--adapter", "finished"],
    ["eval", *_MODEL, *_TINY, "--choices", "choices.jsonl", "--shots", "1", "--shots-from", "choices.jsonl"],
    ["merge", "--adapter", "finished", "--out", "merged", "--device", "cpu"],
    [*MERGE, "--adapter", "finished", "--no-compare"],
    [
        *MERGE[:3],
        "--device",
        "cpu",
        "--adapter",
        "finished",
        "--out",
        "merged.gguf",
        "--format",
        "gguf",
        "--no-compare",
    ],
    [*EXPORT, "--adapter", "finished"],
    [*EXPORT, "--adapter", "finished", "--modelfile", "Modelfile"],
    [*EXPORT_OLLAMA, "--quantize", "q4_0", "--imatrix", "eval.jsonl"],
    ["export", "llama.cpp", "--adapter", "finished", "--out", "exported", "--device", "cpu", "--quantize", "q8_0"],
    ["data", "show", "data.jsonl", "folder", "--model", "model"],
    ["warm", *_MODEL, "--max-length", "16"],
    ["import-config", "theirs.yml", "--out", "ours.yaml"],
    ["selftest", "--device", "cpu", "--only", "silu"],
    ["push", "me/mine", "--adapter", "finished"],
    ["cache", "list"],
    ["cache", "clear"],
    ["completion", "bash"],
    ["finetune", "--help"],
    ["--version"],
)
# Values of variables that name a folder; nothing that leads out of the case's folder can be made or written to.
_FOLDERS: tuple[str, ...] = (
    "",
    "cache",
    HERE + "/data.jsonl",
    "/dev/null",
    "/proc/self",
    "/proc/x/y",
    LONG,
    "\udcff\udcfe",
    "a\nb",
    " ",
)
_FOLDERS += (HERE + "/fifo", HERE + "/model", HERE + "/\udcff", HERE + "/" + LONG, "~", "~nobody/x")
# Those that start processes of their own, which takes a second.
_RARE = (
    ["plan", "--model", "model", "--data", "data.jsonl", "--max-length", "16", "--vram", "8GiB"],
    ["selftest", "--page", "page.html", "--only", "silu"],
)
_NUMBERS = ("", " ", "0", "-1", "1", "x", "nan", "inf", "1e999", "9" * 5000, "0.5", "\u0663", "\udcff", "1e-9")
VARIABLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "TMPDIR", "HF_HOME"), _FOLDERS),
    **dict.fromkeys(("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"), _NUMBERS),
    "WGRAD_DEVICE_TIMEOUT": _NUMBERS,
    "WGRAD_VERIFY": _NUMBERS,
    "WGRAD_MATRIX_UNITS": _NUMBERS,
    "WGRAD_API_KEY": (*_NUMBERS, "\x01", "x" * 9000, "a b"),
    "WGRAD_STDIN_COPY": _FOLDERS,
    "WGRAD_LAUNCHER": (*_NUMBERS, "host 1", "host x"),
    "OMPI_COMM_WORLD_SIZE": ("", "0", "-1", "x", "1.0", "\u0663", "\udcff"),
    "PMI_SIZE": ("", "0", "-1", "x", "\udcff"),
    "OMPI_COMM_WORLD_RANK": _NUMBERS,
    "TERM": ("", "dumb", "\x1b[", "x" * 300, "\udcff"),
    "TZ": ("", "x", ":/dev/zero", "\udcff", "../../x"),
    "LANG": ("C", "x", "\udcff"),
}
_MODES = (0, 0, 0, 0o200, 0o444, 0o555)


def files_of_lines(groups: Any) -> Files:
    """The files that LINES name, beside a model, data and a run."""
    files: Files = {f"finished/{name[4:]}": content for name, content in groups["finished"].items()}
    files |= {
        "eval.jsonl": groups["data"]["data.jsonl"],
        "folder/train.jsonl": groups["data"]["data.jsonl"],
        "mine.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}",
        "run.yaml": b"weight_decay: 0.1\n",
        "prompts.jsonl": b'{"prompt": "a"}\n',
        "choices.jsonl": b'{"question": "which", "choices": ["a", "b"], "answer": 1}\n' * 3,
        "theirs.yml": b"base_model: model\nadapter: qlora\nlora_r: 8\n",
        "whole.gguf": groups["gguf-alone"]["model/model.gguf"],
    }
    return files


def surroundings_case(rng: Random, groups: Any) -> Case:
    """A sound command in one or two hostile surroundings."""
    argv = rng.choice(LINES if rng.random() < 0.995 else _RARE)
    base = ["model", "data", "adapter", "of-lines"]
    base += ["unfinished"] if "--resume" in argv or "out" not in argv or argv[0] == "watch" else []
    names = sorted({name for group in base for name in groups[group]})
    around: dict[str, Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2))):
        around |= _surrounding(rng, names)
    if around.get("cwd") and rng.random() < 0.7:
        argv = [f"{HERE}/{word}" if word.partition("/")[0] in _PATHS else word for word in argv]
    return Case(argv, base, stdin=rng.choice((b"", b"hi\n", b"\xff")), around=around)


_PATHS: tuple[str, ...] = (
    "model",
    "data.jsonl",
    "finished",
    "eval.jsonl",
    "folder",
    "mine.jinja",
    "prompts.jsonl",
    "choices.jsonl",
)
_PATHS += ("theirs.yml", "whole.gguf", "run.yaml", "adapter")


def _surrounding(rng: Random, names: list[str]) -> dict[str, Any]:
    kind = rng.choice(("modes", "modes", "modes", "environment", "environment", "limits", "closed", "cwd"))
    if kind == "modes":
        folders = sorted({parent.as_posix() for name in names for parent in Path(name).parents})
        chosen = rng.sample(rng.choice((names, folders)), rng.choice((1, 1, 2)))
        return {kind: {name: rng.choice(_MODES) for name in chosen}}
    if kind == "environment":
        chosen = rng.sample(sorted(VARIABLES), rng.choice((1, 1, 2)))
        return {kind: {name: None if rng.random() < 0.1 else rng.choice(VARIABLES[name]) for name in chosen}}
    if kind == "limits":
        return {rng.choice(("threads", "processes", "files")): rng.randrange(12)} if rng.random() < 0.6 else {
            "written": rng.choice((0, 1, 100, 2000, 4096, 10_000, 40_000))
        }  # fmt: skip
    return {kind: rng.choice(([0], [1], [2], [0, 1, 2], [1, 2]))} if kind == "closed" else {kind: "gone"}


# ---- in the child ------------------------------------------------------------------------------
@contextmanager
def surrounded(around: dict[str, Any], folder: Path) -> Iterator[None]:
    """Create what surrounds a case whose folder is the working folder."""
    if not around:
        yield
        return
    with ExitStack() as held:
        for name in sorted(around, key=list(_KINDS).index):
            held.enter_context(_KINDS[name](around[name], folder))
        yield


@contextmanager
def _modes(modes: dict[str, int], folder: Path) -> Iterator[None]:
    paths = [folder / name for name in modes]
    before = {path: path.stat().st_mode & 0o777 for path in paths if path.exists() and not path.is_symlink()}
    for path in sorted(before, reverse=True):  # what is within a folder before it
        path.chmod(modes[path.relative_to(folder).as_posix()])
    try:
        with modes_count():
            yield
    finally:
        for path in sorted(before):
            with suppress(FileNotFoundError):
                path.chmod(before[path])


@contextmanager
def _environment(values: dict[str, str | None], folder: Path) -> Iterator[None]:
    given = {name: value.replace(HERE, str(folder)) for name, value in values.items() if value is not None}
    with patch.dict(os.environ, given), patch.object(tempfile, "tempdir", None):
        for name in values.keys() - given.keys():
            os.environ.pop(name, None)
        yield


@contextmanager
def _limit(kind: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def _files(more: int, folder: Path) -> Iterator[None]:
    """Let so many more files be open."""
    opened = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(4096) if number not in opened)
    most = next(number for count, number in enumerate(free) if count == more)
    with _limit(resource.RLIMIT_NOFILE, most):
        yield


@contextmanager
def _written(most: int, folder: Path) -> Iterator[None]:
    """Let no file be larger; standard output and error are files too, and take `most` bytes more."""
    for number in (1, 2):
        with suppress(OSError):  # closed
            os.ftruncate(number, 0)
    with _limit(resource.RLIMIT_FSIZE, most):
        yield


def _refuse(*given: Any, **named: Any) -> NoReturn:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@contextmanager
def _processes(count: int, folder: Path) -> Iterator[None]:
    with patch.object(os, "fork", _refuse), patch.object(subprocess.Popen, "_execute_child", _refuse):
        yield


@contextmanager
def _threads(count: int, folder: Path) -> Iterator[None]:
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start, left = getattr(threading, name), count

    def start_some(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")  # as Python does
        return start(*given, **named)

    with patch.object(threading, name, start_some):
        yield


@contextmanager
def _closed(numbers: list[int], folder: Path) -> Iterator[None]:
    """Close standard streams, as `<&-` does; Python then has None in their place."""
    for number in numbers:
        name = ("stdin", "stdout", "stderr")[number]
        getattr(sys, name).close()
        os.close(number)
        setattr(sys, name, None)
    yield


@contextmanager
def _no_folder(kind: str, folder: Path) -> Iterator[None]:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    try:
        yield
    finally:
        os.chdir(folder)


_KINDS: dict[str, Any] = {
    "environment": _environment, "cwd": _no_folder, "closed": _closed, "written": _written, "files": _files,
    "threads": _threads, "processes": _processes, "modes": _modes,
}  # fmt: skip
