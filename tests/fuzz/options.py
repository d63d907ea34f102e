"""Command lines: options with values good, odd and hostile, in combinations."""

from __future__ import annotations

import argparse
from functools import cache
from random import Random

from tests.fuzz.base import FINETUNE, GENERATE, HIDDEN, SAMPLING
from tests.fuzz.case import Case
from tests.fuzz.texts import odd_text
from tests.fuzz.words import COSTLY, DEVICES, MODULES, OPTION_NUMBERS, PATIENCE, READ_PATHS, WRITE_PATHS
from wgrad.train.commands.cli import build_parser

SKIPPED = ("help", "version", "resume", "ranks")  # resume: kinds.py; ranks: starts processes


@cache
def _actions(command: str) -> list[argparse.Action]:
    parser = build_parser()
    subs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return [a for a in subs.choices[command]._actions if a.option_strings and a.dest not in SKIPPED]


def option_names() -> list[str]:
    """Fields of the run's configuration, as keys of a --config file."""
    return [a.dest for a in _actions("finetune") if a.dest != "config"]


def _value(rng: Random, action: argparse.Action) -> list[str]:
    name, chance = action.dest, rng.random()
    if name in ("out", "report", "page"):
        return [rng.choice(WRITE_PATHS)]
    if name in COSTLY:
        return [rng.choice(PATIENCE)]
    if name == "device":
        return [rng.choice(DEVICES)]
    if name in ("model", "data", "eval_data", "adapter", "config"):
        return [rng.choice(READ_PATHS)]
    if name == "target_modules":
        return rng.choices(MODULES, k=rng.choice((1, 1, 2, 3)))
    if action.choices and chance < 0.5:
        return [str(rng.choice(list(action.choices)))]
    return [rng.choice(OPTION_NUMBERS) if chance < 0.75 else odd_text(rng)]


def _words(rng: Random, action: argparse.Action) -> list[str]:
    flag = rng.choice(action.option_strings)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [flag] if rng.random() < 0.95 else [f"{flag}=1"]
    values = _value(rng, action)
    if len(values) == 1 and rng.random() < 0.5:
        return [f"{flag}={values[0]}"]
    return [flag, *values] if rng.random() < 0.97 else [flag]


def changed_options(rng: Random, command: str, kept: tuple[str, ...] = ()) -> list[str]:
    """Return one to four options of a command with values good, odd and hostile. kept: those that stay as they are."""
    actions = [action for action in _actions(command) if action.dest not in kept]
    chosen = rng.sample(actions, min(len(actions), rng.choice((1, 1, 1, 2, 2, 4))))
    return [word for action in chosen for word in _words(rng, action)]


def option_case(rng: Random) -> Case:
    """`finetune`, `generate` or `selftest` with one to four options changed."""
    command = rng.choice(("finetune", "finetune", "finetune", "generate", "generate", "selftest"))
    if command == "finetune":
        argv = [*(SAMPLING if rng.random() < 0.2 else FINETUNE), "--max-steps", "1"]
    elif command == "generate":
        argv = [*GENERATE, "x"]
    else:
        argv = ["selftest", "--device", "cpu", "--only", "no such case"]
    actions = _actions(command)
    for action in rng.sample(actions, min(len(actions), rng.choice((1, 1, 1, 2, 2, 4)))):
        words = _words(rng, action)
        if command == "selftest" and action.dest == "only" and len(words) and len("".join(words)) < 12:
            continue  # a part of many cases' names: sound, and long
        argv += words
    if rng.random() < 0.05:
        argv.insert(
            rng.randrange(len(argv) + 1),
            rng.choice(("", "-", "--", "--nope", "-x", "\udc80", "@x", "--model=", "x" * 300)),
        )
    if rng.random() < 0.03:
        del argv[rng.randrange(len(argv))]
    stdin = rng.choice((b"", b"hi", b"\xff\xfe", b"\xed\xa0\x80", b"a\x00b", "é".encode("latin-1"), b"x" * HIDDEN))
    return Case(
        argv,
        ["model", "data", "adapter", "odd"],
        stdin=stdin,
        encoding=rng.choice(("utf-8", "utf-8", "ascii", "latin-1")),
    )


def stream_case(rng: Random) -> Case:
    """Prompts, standard input and standard output: not UTF-8, empty, full, closed."""
    prompt = rng.choice(("-", "-", odd_text(rng), odd_text(rng)))
    argv = [
        *GENERATE[:-2],
        "3",
        "--temperature",
        rng.choice(("0", "5")),
        "--seed",
        str(rng.randrange(99)),
        f"--prompt={prompt}",
    ]
    if rng.random() < 0.3:
        argv.append("--chat")
    if rng.random() < 0.3:
        argv = [*SAMPLING, "--max-steps", "1", f"--sample-prompt={odd_text(rng)}"]
    stdin = odd_text(rng).encode("utf-8", "surrogateescape" if rng.random() < 0.5 else "replace")
    if rng.random() < 0.3:
        stdin = rng.choice(
            (b"", b"\xff", b"\xed\xa0\x80", b"a\x00", b"\xef\xbb\xbfhi", "é".encode("utf-16"), b"\n", b"x" * 3000)
        )
    stdout = rng.choice(("", "", "", "/dev/full", "closed"))
    encoding = rng.choice(("utf-8", "ascii", "latin-1", "cp1252"))
    return Case(argv, ["model", "data"], stdin=stdin, stdout=stdout, encoding=encoding)
