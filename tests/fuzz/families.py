"""Models of every family: keys of config.json that only some families read, and names and shapes of their tensors."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import safetensors.numpy

from tests.fuzz.base import FINETUNE, GENERATE, dump
from tests.fuzz.case import Case, Files
from tests.fuzz.values import hostile, mutate_bytes, mutate_json, near, write_json
from tests.fuzz.weights import join, mutate_safetensors, replace_values, split
from tests.train.tiny_models import random_weights, tiny_config
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.multimodal import MULTIMODAL

_OUTER = {text: [name for name, whole in MULTIMODAL.items() if text in whole.texts.values()] for text in FAMILIES}
_LAYERS = ("full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "attention", "moe", "dense", "x")
_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 48, 96, -1, 0.0, 0.5, 1.0, 2.5, 1e-9, True, False, None, [], {}, [0], [1], [0, 1]),
    *([1, 0], [0.5, 0.5], [2, 2], [True, False], "silu", "gelu", "relu2", "softmax", "sigmoid", "M*", "*-", "all", ""),
    {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "yarn", "factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "default"}},
)  # fmt: skip


@cache
def _weights(text: str) -> bytes:
    """model.safetensors of a config.json, in bfloat16; its values are few, so that a kept file is small."""
    weights = random_weights(json.loads(text), 1)
    arrays = {name: np.asarray(np.round(4 * value) / 4, ml_dtypes.bfloat16) for name, value in weights.items()}
    return safetensors.numpy.save(arrays, {"format": "pt"})


@cache
def _keys(name: str) -> list[str]:
    return sorted(field.encode_name for field in msgspec.structs.fields(FAMILIES[name].keys))


def _value(rng: Random, known: Any) -> Any:
    chance = rng.random()
    if chance < 0.15:
        return [rng.choice(_LAYERS) for _ in range(rng.choice((1, 2, 2, 2, 3, 4)))]
    if chance < 0.3:
        return hostile(rng)
    return near(rng, known) if chance < 0.5 and known is not None else rng.choice(_VALUES)


def _changed_config(rng: Random, name: str, config: dict[str, Any]) -> bytes:
    if rng.random() < 0.15:
        return mutate_json(rng, dump(config))
    changed = dict(config)
    for key in rng.sample(_keys(name), rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            changed.pop(key, None)
        else:
            changed[key] = _value(rng, config.get(key))
    if rng.random() < 0.1:
        other = rng.choice(sorted(FAMILIES))
        changed |= rng.choice(({"model_type": FAMILIES[other].model_type}, {"architectures": [other]}))
    return write_json(rng, changed)


def _changed_weights(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return mutate_safetensors(rng, data) if rng.random() < 0.7 else replace_values(rng, data)
    header, body = split(data)
    name = rng.choice(sorted(name for name in header if name != "__metadata__"))
    shape = header[name]["shape"]
    if len(shape) > 1 and rng.random() < 0.5:  # as many numbers, in another shape
        header[name]["shape"] = rng.choice((shape[::-1], [shape[0] * shape[1], *shape[2:]], [1, *shape], [*shape, 1]))
    else:
        del header[name]
    return join(json.dumps(header).encode(), body)


def _as_text_part(rng: Random, name: str, config: bytes, weights: bytes) -> tuple[bytes, bytes]:
    """Return the files of a multimodal model with this text model."""
    outer = rng.choice(_OUTER[name])
    whole: dict[str, Any] = {"architectures": [outer], "model_type": MULTIMODAL[outer].model_type}
    text: dict[str, Any] = {"text_config": "\u2042"}
    text = {"thinker_config": text} if "thinker_config" in MULTIMODAL[outer].text_keys[0] else text
    marked = dump(whole | text).replace(json.dumps("\u2042").encode(), config)
    try:
        header, body = split(weights)
    except (ValueError, RecursionError):  # broken on purpose
        return marked, weights
    if not isinstance(header, dict):
        return marked, weights
    of_text = ("model.language_model.", "language_model.model.", "model.text_model.", "thinker.model.", "model.")
    prefix = rng.choice(of_text)
    named = {
        key.replace("model.", prefix, 1) if key.startswith("model.") else key: value for key, value in header.items()
    }
    return marked, join(json.dumps(named).encode(), body)


def family_case(rng: Random, groups: Any) -> Case:
    """A model of any family, its configuration or its weights changed, alone or as a part of a multimodal model."""
    name = rng.choice(sorted(FAMILIES))
    config = tiny_config(name)
    text, weights = dump(config), _weights(json.dumps(config))
    if rng.random() < 0.75:
        text = _changed_config(rng, name, config)
    else:
        weights = _changed_weights(rng, weights)
    if _OUTER[name] and rng.random() < 0.2:
        text, weights = _as_text_part(rng, name, text, weights)
    files: Files = {"model/config.json": text, "model/model.safetensors": weights}
    if rng.random() < 0.03:
        files["model/config.json"] = mutate_bytes(rng, text)
    return Case(list(_command(rng)), ["model", "data"], files)


def _command(rng: Random) -> list[str]:
    if rng.random() < 0.75:
        return [*GENERATE, "x"]
    return [*FINETUNE, "--max-steps", "1", *rng.choice(([], [], ["--full"], ["--target-modules", "all-linear"]))]
