"""Commands beside `finetune` and `generate`, with options and files changed; and what users type into `chat`."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.base import EXPORT, FINETUNE, MERGE, dump
from tests.fuzz.case import Case, Content, Files, Special
from tests.fuzz.options import changed_options, option_names
from tests.fuzz.texts import odd_text, yaml_text
from tests.fuzz.tools import EXPORT as EXPORT_MODEL
from tests.fuzz.values import mutate_bytes, mutate_json, mutate_value, write_json
from tests.fuzz.words import READ_PATHS

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
    "prompts": ["generate", *_MODEL, "--max-new-tokens", "1", "--prompts", "prompts.jsonl"],
    "chat": ["chat", *_MODEL, "--max-new-tokens", "1"],
    "serve": ["serve", *_MODEL, "--port", "0", "--context", "32", "--max-new-tokens", "1"],
    "watch": ["watch", "out", "--port", "0"],
    "studio": ["studio", ".", "--port", "0"],
    "warm": ["warm", *_MODEL, "--max-length", "16"],
    "sweep": ["sweep", "--vary", "lora_alpha=1,2", *FINETUNE[1:], "--max-steps", "1"],
    "export-model": [*EXPORT_MODEL, "--quantize", "q8_0"],
    "import": ["import-config", "theirs.yml"],
    "push": ["push", "me/mine", "--adapter", "out"],
    "report": ["report-gpu", "--device", "nope"],
    "completion": ["completion", "bash"],
}
# Where a line has no option before these words, another one may stand for them.
_POSITIONAL = ("show", "list", "ollama", "bash", "me/mine", "out", ".", "theirs.yml", "data.jsonl")
_QUESTIONS: list[Any] = [
    {"question": "which", "choices": ["a", "b"], "answer": 1},
    {"question": "who", "choices": ["a", "b", "c"], "answer": "b"},
    {"question": "", "choices": ["", " "], "answer": 0},
]
_BENCH = {
    "format": 1, "device": {"description": "NumPy"},
    "rates": {
        "size": "tiny", "roofs": [{"name": "memory", "spread": 0.1}, {"name": "float32", "spread": 0.1}],
        "rows": [{"name": "silu/16x128/float32", "roof": "memory", "share": 0.5, "spread": 0.1}],
    },
}  # fmt: skip
_FILES: Files = {
    "prompts.jsonl": b'{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n',
    "theirs.yml": b"base_model: model\nadapter: qlora\nlora_r: 8\nlearning_rate: 1e-4\n",
}
_KEPT = ("warm_up", "device")  # one may last for ever, and the other's parts take seconds
_TYPED = ("/help", "/clear", "/exit", "/thoughts", "/", "/nope", "", " ", "hi", "\x00", "\x1b[A", "</s>", "x" * 5000)


def command_case(rng: Random, groups: Any) -> Case:
    """A command with options changed, or with a file that only it reads."""
    if rng.random() < 0.15:
        return _chat_case(rng)
    name = rng.choice(sorted(_LINES))
    argv = list(_LINES[name])
    files: Files = dict(_FILES)
    base = ["model", "data", "adapter", "odd", *(["finished"] if argv[0] in ("push", "watch", "studio") else [])]
    if name == "choices":
        lines = [mutate_value(rng, one) if rng.random() < 0.4 else one for one in _QUESTIONS]
        files["choices.jsonl"] = b"\n".join(write_json(rng, line) for line in lines)
        argv += rng.choice(([], ["--shots", "1"], ["--chat"], ["--shots", "2", "--shots-from", "choices.jsonl"]))
    elif name == "compare":
        files["bench.json"] = mutate_json(rng, dump(_BENCH))
    elif name == "push":
        for path in rng.sample(("results.json", "config.yaml", "adapter_config.json", "README.md"), rng.randrange(3)):
            files[f"out/{path}"] = _changed(rng, path, groups["finished"][f"out/{path}"])
    elif name == "prompts" and rng.random() < 0.5:
        files["prompts.jsonl"] = _changed(rng, "prompts.json", dump({"prompt": "a", "seed": 1}))
    if name not in ("choices", "compare") or rng.random() < 0.2:
        argv += changed_options(rng, argv[0], _KEPT if name in ("bench", "report") else ())
    spots = [at for at, word in enumerate(argv) if word in _POSITIONAL and not argv[at - 1].startswith("--")]
    if spots and rng.random() < 0.15:
        argv[rng.choice(spots)] = rng.choice((*READ_PATHS, odd_text(rng)))
    return Case(argv, base, files, stdin=rng.choice((b"", b"hi\n", b"\xff")))


def _changed(rng: Random, name: str, content: Any) -> Content:
    if rng.random() < 0.1:
        return Special(rng.choice(("absent", "folder", "fifo")))
    if name.endswith(".json"):
        return mutate_json(rng, content)
    return yaml_text(rng, option_names()) if name.endswith(".yaml") else mutate_bytes(rng, content)


def _chat_case(rng: Random) -> Case:
    typed = [rng.choice(_TYPED) if rng.random() < 0.7 else odd_text(rng) for _ in range(rng.choice((1, 2, 5)))]
    stdin = "\n".join(typed).encode("utf-8", "surrogateescape" if rng.random() < 0.5 else "replace")
    argv = ["chat", *_MODEL, "--max-new-tokens", "2", *rng.choice(([], ["--adapter", "adapter"]))]
    return Case(argv, ["model", "adapter"], stdin=stdin, encoding=rng.choice(("utf-8", "ascii")))
