"""Commands beside `finetune` and `generate`, with options and files changed; and what users type into `chat`."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.base import EXPORT, MERGE, dump
from tests.fuzz.case import Case, Files
from tests.fuzz.options import changed_options
from tests.fuzz.texts import odd_text
from tests.fuzz.values import mutate_json, mutate_value, write_json

_MODEL = ["--model", "model", "--device", "cpu"]
_EVAL = ["eval", *_MODEL, "--max-length", "16", "--batch-size", "1"]
# A sound line of each command.
_LINES: dict[str, list[str]] = {
    "plan": ["plan", *_MODEL, "--data", "data.jsonl", "--max-length", "16"],
    "data": ["data", "show", "data.jsonl", "--model", "model"],
    "eval": [*_EVAL, "--data", "data.jsonl"],
    "choices": [*_EVAL, "--choices", "choices.jsonl"],
    "merge": [*MERGE, "--adapter", "adapter", "--no-compare"],
    "export": [*EXPORT, "--adapter", "adapter"],
    "bench": "bench --device cpu --size tiny --op silu --warm-up 0".split(),
    "compare": "bench --device cpu --size tiny --op silu --warm-up 0 --compare bench.json".split(),
    "cache": ["cache", "list"],
}
_QUESTIONS: list[Any] = [
    {"question": "which", "choices": ["a", "b"], "answer": 1},
    {"question": "who", "choices": ["a", "b", "c"], "answer": "b"},
    {"question": "", "choices": ["", " "], "answer": 0},
]
_BENCH = {
    "format": 1, "size": "tiny", "device": {"name": "cpu", "description": "NumPy"},
    "roofs": [{"name": "memory", "spread": 0.1}, {"name": "float32", "spread": 0.1}],
    "rows": [{"name": "silu forward 4x4 float32", "roof": "memory", "share": 0.5, "spread": 0.1}],
}  # fmt: skip
_TYPED = ("/help", "/clear", "/exit", "/thoughts", "/", "/nope", "", " ", "hi", "\x00", "\x1b[A", "</s>", "x" * 5000)


def command_case(rng: Random, groups: Any) -> Case:
    """A command with options changed, or with a file that only it reads."""
    if rng.random() < 0.15:
        return _chat_case(rng)
    name = rng.choice(sorted(_LINES))
    argv = list(_LINES[name])
    files: Files = {}
    if name == "choices":
        lines = [mutate_value(rng, one) if rng.random() < 0.4 else one for one in _QUESTIONS]
        files["choices.jsonl"] = b"\n".join(write_json(rng, line) for line in lines)
        argv += rng.choice(([], ["--shots", "1"], ["--chat"], ["--shots", "2", "--shots-from", "choices.jsonl"]))
    elif name == "compare":
        files["bench.json"] = mutate_json(rng, dump(_BENCH))
    if name not in ("choices", "compare") or rng.random() < 0.2:
        argv += changed_options(rng, argv[0], kept=("warm_up",))  # which may last for ever
    return Case(argv, ["model", "data", "adapter", "odd"], files)


def _chat_case(rng: Random) -> Case:
    typed = [rng.choice(_TYPED) if rng.random() < 0.7 else odd_text(rng) for _ in range(rng.choice((1, 2, 5)))]
    stdin = "\n".join(typed).encode("utf-8", "surrogateescape" if rng.random() < 0.5 else "replace")
    argv = ["chat", *_MODEL, "--max-new-tokens", "2", *rng.choice(([], ["--adapter", "adapter"]))]
    return Case(argv, ["model", "adapter"], stdin=stdin, encoding=rng.choice(("utf-8", "ascii")))
