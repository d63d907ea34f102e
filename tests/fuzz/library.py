"""Calls of the Python library with arguments of any type: `python FUNCTION`, with arguments.json."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.case import Case
from tests.fuzz.options import option_names
from tests.fuzz.texts import odd_text
from tests.fuzz.values import Raw, hostile, near, write_json
from tests.fuzz.words import COSTLY, PATIENCE, READ_PATHS, WRITE_PATHS, YAML_VALUES
from wgrad.train.terminal.ending import one_line

PYTHON = "python"
_RUN = {
    "model": "model", "data": "data.jsonl", "out": "out", "device": "cpu", "max_steps": 1, "max_length": 16,
    "lora_r": 2, "batch_size": 1, "gradient_accumulation_steps": 1, "sample": False, "eval_fraction": 0,
}  # fmt: skip
_SWEEP = {**_RUN, "vary": {"seed": [1, 2]}, "eval_fraction": 0.5}
_LOAD = {"model": "model", "adapter": None, "device": "cpu", "context": 32}
_GENERATE = {"prompt": "a", "max_new_tokens": 1, "temperature": 0.5, "seed": 1, "stop": ["b"], **_LOAD}
_CALLS: dict[str, dict[str, Any]] = {"finetune": _RUN, "sweep": _SWEEP, "load": _LOAD, "generate": _GENERATE}
_LONG = [Raw("1" + "0" * 5000), Raw("-1" + "0" * 5000)]
_VARIED = [
    {"seed": _LONG[0]}, {"seed": [_LONG[0]]}, {"seed": []}, {"seed": [[1]]}, {"seed": [{}]}, {"": [1]}, [], None,
    "seed=1", {"lora_r": "1..2"}, {"target_modules": [["q_proj"], ["v_proj"]]}, {"target_modules": [["q_proj", 1]]},
    {"seed": [None]}, {"learning_rate": ["1e-4", "x"]}, {"no_such": [1]}, {"seed": {"a": 1}}, {"seed": "1" * 5000},
    {"out": ["a"]},
]  # fmt: skip


def python_case(rng: Random, groups: Any) -> Case:
    """A call with one to three arguments of any type."""
    name = rng.choice(("finetune", "finetune", "sweep", "load", "generate"))
    given = dict(_CALLS[name])
    others = [*given, *(option_names() if name in ("finetune", "sweep") else ("compute", "quantize", "chat_template"))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice((*others, "no_such", "callbacks", "progress"))
        given[key] = _value(rng, key, given.get(key))
    if name == "sweep" and rng.random() < 0.6:
        given["vary"] = rng.choice(_VARIED)
        given["trials"] = rng.choice((None, None, 1, 0, -1, "2", 1.5, True, _LONG[0]))
    return Case([PYTHON, name], ["model", "data", "adapter", "odd"], {"arguments.json": write_json(rng, given)})


def _value(rng: Random, key: str, known: Any) -> Any:
    chance = rng.random()
    if key in COSTLY:
        return rng.choice((*PATIENCE, *_LONG, None, [1], 0, -1, 0.5, True))
    if key in ("out", "config"):
        return rng.choice((*WRITE_PATHS, None, 1, [], {}))
    if chance < 0.15:
        return rng.choice(_LONG)
    if chance < 0.3:
        return rng.choice(READ_PATHS)
    if chance < 0.5:
        return rng.choice((*YAML_VALUES, odd_text(rng)))
    return near(rng, known) if chance < 0.7 and known is not None else hostile(rng)


def call(name: str) -> int:
    """Call the library as a program does: only its own errors may come out."""
    import wgrad

    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        given = json.loads(Path("arguments.json").read_bytes())
    except (ValueError, RecursionError):  # broken on purpose
        return 0
    finally:
        sys.set_int_max_str_digits(most)
    if not isinstance(given, dict):
        return 0
    model = [given.pop("model", None), given.pop("adapter", None)] if name == "load" else []
    try:
        with warnings.catch_warnings(action="ignore"):  # those about the data
            getattr(wgrad, name)(*model, **given)
    except (wgrad.WgradError, wgrad.DeviceError) as error:
        print(f"wgrad: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0
