"""Conversion between the model's tensors and files that name them differently or split them.

This concerns mostly layers with linear attention. Tensors are written as in the original files of a model's authors.
StableLM's norms of heads are one tensor for each head in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.gguf_files import GgufEntry
from wgrad.train.files.input_files import one_line
from wgrad.train.files.nf4_files import is_nf4
from wgrad.train.files.packed_files import PackedEntry
from wgrad.train.files.safetensors_files import TensorEntry, TensorSource
from wgrad.train.model.expert_files import StackedEntry, TransposedEntry
from wgrad.train.model.linear_attention import LinearAttention
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import weight_specs

# By `LinearAttention.files`: a tensor's path within a layer, and the files' tensors whose rows make it up.
LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {},
    "convolutions apart": {
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "post_attention_layernorm.weight": ("feedforward_layer_norm.weight",),
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{part}_conv1d.weight" for part in "qkv"),
    },
}


def _names(config: ModelConfig, every_layer: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the tensors that files name differently, with these names.

    every_layer: include layers without linear attention.
    """
    if config.qk_norm_apart:
        for layer in range(config.num_hidden_layers):
            for norm, heads in ((config.q_norm, config.heads_of(layer)), (config.k_norm, config.kv_heads_of(layer))):
                path = f"model.layers.{layer}.{norm}"
                yield f"{path}.weight", [f"{path}.norms.{head}.weight" for head in range(heads)]
    if not isinstance(config.linear, LinearAttention):
        return
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        if every_layer or config.linear.layers[layer]:
            for path, parts in LAYOUTS[config.linear.files].items():
                yield prefix + path, [prefix + part for part in parts]


def by_own_names(entries: Mapping[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Return entries under the model's names, for files whose names begin differently."""
    return {_own_name(name, config): entry for name, entry in entries.items()}


def with_linear(entries: Mapping[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Return entries under the model's names, with the parts of split tensors joined.

    Raises:
        WgradError: A part is missing or has the wrong shape.
    """
    found = dict(entries)
    for name, parts in _names(config, every_layer=True):  # transformers renames the norms of all layers
        first = found.get(parts[0])
        if first is None:
            continue
        missing = next((part for part in parts if part not in found), None)
        if missing is not None:
            raise WgradError(
                f"{first.source}: {first.path.parent} has no tensor {missing}: config.json and the weights do not "
                "belong together, or a shard is missing: fetch the model again"
            )
        taken = [found.pop(part) for part in parts]
        found[name] = first if len(taken) == 1 and not config.qk_norm_apart else _joined(name, taken, config)
    return found


def with_transposed(entries: dict[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    """Return entries with the projections as [out, in], for families whose files have them the other way.

    GGUF and quantized files, bitsandbytes' for one, have them as [out, in].
    """
    found = dict(entries)
    for spec in weight_specs(config) if config.transposed else ():
        entry = entries.get(spec.name)
        if spec.kind != "projection" or entry is None or len(entry.shape) != 2:
            continue
        if not isinstance(entry, (GgufEntry, PackedEntry)) and not is_nf4(entries, spec.name):
            found[spec.name] = TransposedEntry.of(entry)
    return found


def _own_name(name: str, config: ModelConfig) -> str:
    """Return the model's name of a file's tensor."""
    for own, others in config.file_names:
        for other in others:
            if name.startswith(other):
                return own + name.removeprefix(other)
    return name


def _joined(name: str, parts: list[TensorEntry], config: ModelConfig) -> TensorEntry:
    """Join parts. They may have any number of rows, since transformers writes equal parts."""
    if config.qk_norm_apart:
        wanted: tuple[int, ...] = (len(parts), config.head_dim)
        fit = all(part.shape == wanted[1:] for part in parts)
    else:
        assert isinstance(config.linear, LinearAttention)
        wanted = (config.linear.channels, 1, config.linear.width)
        fit = sum(part.shape[0] for part in parts) == wanted[0] and all(part.shape[1:] == wanted[1:] for part in parts)
    if not fit:
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise WgradError(
            f"{parts[0].source}: {one_line(parts[0].name)} and others in {parts[0].path} have shapes {shapes}: "
            f"config.json asks for {list(wanted)} in all: fetch the model again"
        )
    return StackedEntry.of(name, parts, wanted)


def as_in_files(sources: Iterable[TensorSource], config: ModelConfig) -> Iterator[TensorSource]:
    """Yield tensors to write under the files' names, split as in the files."""
    names = dict(_names(config, every_layer=False))
    for source in sources:
        own = next((pair for pair in config.file_names if source.name.startswith(pair[0])), None)
        if own is not None:
            source = replace(source, name=own[1][0] + source.name.removeprefix(own[0]))
        parts = names.get(source.name, [source.name])
        if len(parts) == 1 and not (config.qk_norm_apart and source.name in names):
            yield replace(source, name=parts[0])
            continue
        if config.qk_norm_apart:
            rows, held = (1,) * len(parts), list[np.ndarray]()
            shapes = [source.shape[1:]] * len(parts)
        else:
            assert isinstance(config.linear, LinearAttention)
            rows, held = config.linear.rows, list[np.ndarray]()
            shapes = [(count, *source.shape[1:]) for count in rows]
        for number, (part, count, shape) in enumerate(zip(parts, rows, shapes)):
            value = partial(_part, source, held, sum(rows[:number]), count, shape, number + 1 == len(parts))
            yield TensorSource(part, source.dtype, shape, value)


def _part(
    source: TensorSource, held: list[np.ndarray], first: int, rows: int, shape: tuple[int, ...], last: bool
) -> np.ndarray:
    """Return rows of a tensor in this shape. It is fetched for the first part and released after the last.

    held: empty, or holds the fetched tensor.
    """
    if not held:
        held.append(source.fetch())
    found = held[0][first : first + rows].reshape(shape)
    if last:
        held.clear()
    return found
