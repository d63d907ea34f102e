"""Files and folders that are there and sound, with names that no one expects."""

from __future__ import annotations

from pathlib import PurePosixPath
from random import Random
from typing import Any

from tests.fuzz.case import Case, Files
from tests.fuzz.surroundings import LINES

_NAMES = (
    "\udcff", "a\udcffb", "a\nb", "\x1b[31m", "[/]", "[red]x", "a b", " a ", "a=b", "a=2", "a:b", "a:train", "{x}",
    "%s", "\u00e9", "'", '"', "$HOME", "a,b", "#", "!x", "&a", "*a", "*", "?", "[a]", "~", "~a", "x" * 200, "\u202e",
    "\U0001f600", ".a", "..a", "None", "null", "true", "1", "1e5", "org--a", "a\\b", "\u2028", "\ufeff", "-a", "@a",
    "|", "> a", "---", "a;b", "\r", "\t", "\x7f", "\x85", "e\u0301", "CON", "\ud800", "{0}", "%", "<a>", "a|b",
)  # fmt: skip
_READ: tuple[str, ...] = ("model", "data.jsonl", "finished", "eval.jsonl", "folder", "mine.jinja", "prompts.jsonl")
_READ += ("choices.jsonl", "theirs.yml", "whole.gguf", "run.yaml", "adapter")
_WRITTEN = ("out", "merged", "merged.gguf", "adapter.gguf", "exported", "answers.jsonl", "ours.yaml", "Modelfile")


def names_case(rng: Random, groups: Any) -> Case:
    """A sound command whose paths have odd names."""
    argv = list(rng.choice(LINES))
    base = ["model", "data", "adapter", "of-lines"]
    base += ["unfinished"] if "--resume" in argv or argv[0] in ("watch", "studio") else []
    files: Files = {}
    spots = [at for at, word in enumerate(argv) if word in (*_READ, *_WRITTEN) and at]
    for at in rng.sample(spots, min(len(spots), rng.choice((1, 1, 2)))):
        word = argv[at]
        name = rng.choice(_NAMES) + PurePosixPath(word).suffix
        if word in (*_READ, "out"):
            for group in base:
                for path, content in groups[group].items():
                    first, slash, rest = path.partition("/")
                    if first == word and "\ud800" not in name:
                        files[name + slash + rest] = content
        argv[at] = rng.choice((name, name, f"./{name}", f"{name}/" if word in ("model", "finished") else name))
    return Case(argv, base, files, stdin=b"hi\n", encoding=rng.choice(("utf-8", "utf-8", "ascii")))
