"""`wgrad sweep`: what varies, its configuration, and the table and trials of a sweep that goes on."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.fuzz.base import RUN_OPTIONS, dump
from tests.fuzz.case import Case, Files, Special
from tests.fuzz.options import option_names
from tests.fuzz.texts import odd_text, yaml_text
from tests.fuzz.values import mutate_bytes, mutate_json
from tests.fuzz.words import YAML_VALUES

_SOUND = ("learning_rate=1e-4,3e-4", "lora_alpha=4,8", "seed=1,2", "target_modules=q_proj;v_proj,q_proj")
_RESULTS = {
    "format": 1,
    "steps": 1,
    "seconds": 0.5,
    "held_out_loss_after": 5.5,
    "held_out_loss_before": 5.6,
    "tokens": 9,
}
_RANGES = ("1..2", "1e-5..1e-3", "2..1", "nan..1", "1..inf", "..", "1..", "0..0", "1...2", "-1..1", "1..9" + "9" * 400)


def sweep_case(rng: Random, groups: Any) -> Case:
    """A sweep of short runs; most often its runs are finished, so that only the table is made."""
    argv = ["sweep", "--model", "model", "--data", "data.jsonl", "--out", "out", *RUN_OPTIONS, "--max-steps", "1"]
    argv += ["--no-sample", "--eval-fraction", "0.5"]
    sound = rng.choice(_SOUND)
    vary = [sound] if rng.random() < 0.5 else [_vary(rng) for _ in range(rng.choice((1, 1, 2)))]
    for one in vary:
        argv += ["--vary", one]
    if rng.random() < 0.3:
        argv += ["--trials", rng.choice(("1", "2", "0", "-1", "x", "\xb2", "9" * 30, "9" * 5000))]
    files: Files = {}
    if rng.random() < 0.3:
        argv += ["--config", "sweep.yaml"]
        files["sweep.yaml"] = yaml_text(rng, [n for n in option_names() if n not in ("out", "device")])
    names = [f"out/{number:03d}-{value}" for number, value in enumerate(_folders(sound), start=1)]
    for name in names:
        files[f"{name}/results.json"] = dump(_RESULTS)
    chosen = rng.choice([*names, "out/trials.json", "out/trials.json"])
    if chosen in names:
        files[f"{chosen}/results.json"] = mutate_json(rng, dump(_RESULTS))
        if rng.random() < 0.1:
            files[f"{chosen}/results.json"] = rng.choice((Special("fifo"), Special("folder"), Special("link", ".")))
        if rng.random() < 0.1:
            del files[f"{chosen}/results.json"]
            files[f"{chosen}/config.yaml"] = yaml_text(rng, option_names())
    elif rng.random() < 0.5:
        files[chosen] = mutate_json(rng, _table(names))
    else:
        files[chosen] = rng.choice((mutate_bytes(rng, _table(names)), Special("fifo"), Special("sparse", 1 << 33)))
    return Case(argv, ["model", "data"], files)


def _folders(vary: str) -> list[str]:
    """Names of the folders of a sweep of two trials."""
    name, _, values = vary.partition("=")
    separator = ";" if ";" in values else ","
    shown = {"1e-4": "0.0001", "3e-4": "0.0003", "4": "4", "8": "8"}
    return [f"{name}={shown.get(value, value).replace(',', '_')}" for value in values.split(separator)]


def _table(names: list[str]) -> bytes:
    rows: list[dict[str, Any]] = [
        {"folder": name.rpartition("/")[2], "options": {}, "held_out_loss": 5.5, "error": None} for name in names
    ]
    return json.dumps({"format": 1, "options": {}, "trials": [{"seed": 1}], "runs": rows, "best": None}).encode()


def _vary(rng: Random) -> str:
    name = rng.choice((*option_names(), *option_names(), "", "out", "no-such", "\udc80", "-", "--lora-r"))
    chance = rng.random()
    if chance < 0.3:
        return f"{name}={rng.choice(_RANGES)}"
    separator = rng.choice((",", ",", ";"))
    values = [odd_text(rng) if rng.random() < 0.2 else rng.choice(YAML_VALUES) for _ in range(rng.choice((1, 2, 3)))]
    return f"{name}={separator.join(values)}" if chance < 0.95 else odd_text(rng)
