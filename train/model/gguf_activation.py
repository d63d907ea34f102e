"""Parameters of the activation xIELU, which GGUF files store as keys with a number for each layer.

Source: github.com/ggml-org/llama.cpp, its converter's ApertusModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import GgufEntry, gguf_parts
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import CONSTANTS, XIELU, WeightSpec


@dataclass(frozen=True)
class NumberEntry(TensorEntry):
    """A tensor filled with one number, which is not in the files as a tensor."""

    number: float = field(repr=False)

    def array(self) -> np.ndarray:
        return np.full(self.shape, self.number, np.float32)

    def sample(self, count: int, size: int) -> list[bytes]:
        return [self.array().tobytes()]


def add_from_keys(entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """Add entries for the parameters of the layers' activations if the file is GGUF.

    Raises:
        WgradError: A key is missing or has another number of layers.
    """
    first = next((entry for entry in entries.values() if isinstance(entry, GgufEntry)), None)
    if config.hidden_act != "xielu" or first is None:
        return
    fields = GgufFields(gguf_parts(first.path, first.source)[0], first.source)
    for name in XIELU:
        key = f"xielu.{name.rpartition('.')[2]}"
        numbers = fields.numbers(key)
        if len(numbers) != config.num_hidden_layers:
            raise fields.error(key, f"must have {config.num_hidden_layers} numbers, got {len(numbers)}")
        for layer, number in enumerate(numbers):
            path = f"model.layers.{layer}.{name}"
            entries[path] = NumberEntry(first.source, first.path, path, "F32", (1,), None, None, float(number))


def write_activation(writer: Any, config: ModelConfig, value: Callable[[WeightSpec], np.ndarray]) -> None:
    """Write the keys with the parameters of the layers' activations. value: returns the array of a tensor."""
    if config.hidden_act != "xielu":
        return
    layers = range(config.num_hidden_layers)
    of_each = [
        [float(value(WeightSpec(f"model.layers.{layer}.{name}", (1,), "bias"))[0]) for layer in layers]
        for name in XIELU
    ]
    constants = [[number] * config.num_hidden_layers for number in CONSTANTS.values()]
    adders = (writer.add_xielu_alpha_p, writer.add_xielu_alpha_n, writer.add_xielu_beta, writer.add_xielu_eps)
    for add, numbers in zip(adders, (*of_each, *constants)):
        add(numbers)
