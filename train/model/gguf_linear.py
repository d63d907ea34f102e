"""Layers with linear attention in GGUF files, whose tensors differ in shape, values and the order of rows.

In GGUF, value heads that share a key head are not adjacent: value head j uses key head j % (number of key heads).
Source: github.com/ggml-org/llama.cpp, its converter's Qwen3NextModel, _LinearAttentionVReorderBase, LFM2Model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import GgufEntry, require_gguf
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.gguf_mamba import (
    key_heads,
    mamba_shape,
    mamba_to_gguf,
    restored,
    without_mamba_place,
    write_mamba,
)
from wgrad.train.model.linear_attention import GatedConvolution, LinearAttention
from wgrad.train.model.mamba_sizes import Mamba1, Mamba2
from wgrad.train.model.model_config import ModelConfig

_IN_A_ROW = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")  # [1, n]; in GGUF [n]
BY_HEAD = "linear_attn.in_proj_qkvz.weight"  # GGUF splits it in two, with the heads of each part in order


def order_of(config: ModelConfig, name: str) -> tuple[str, np.ndarray] | None:
    """Return how GGUF reorders a tensor or projection, or None if it does not.

    Returns:
        The axis, "rows" or "columns", and the index in Hugging Face's order of each of GGUF's rows or columns.
    """
    if config.qkv_proj and config.qkv_by_heads and f".{config.qkv_proj}" in name:
        return "rows", _queries_first(config)
    c = config.linear
    if not isinstance(c, LinearAttention) or c.heads == c.key_heads or c.projected == "by_head":
        return None
    heads = np.arange(c.heads).reshape(c.key_heads, -1).T.reshape(-1)
    values = (heads[:, None] * c.value_dim + np.arange(c.value_dim)).reshape(-1)
    part = name.partition("linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_qkv", "conv1d"):
        before = c.channels - c.value_size
        return "rows", np.concatenate([np.arange(before), before + values])
    if part in ("in_proj_b", "in_proj_a", "A_log", "dt_bias"):
        return "rows", heads
    return {"in_proj_z": ("rows", values), "out_proj": ("columns", values)}.get(part)


def _queries_first(config: ModelConfig) -> np.ndarray:
    """Return the rows of `qkv_proj` of all queries, then of all keys, then of all values."""
    groups, width = config.num_key_value_heads, config.head_dim
    rows = np.arange((config.num_attention_heads + 2 * groups) * width).reshape(groups, -1, width)
    return np.concatenate([part.reshape(-1) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])


def rows_by_head(c: LinearAttention) -> dict[str, np.ndarray]:
    """Return the rows of BY_HEAD's weight that form each of its two projections in GGUF."""
    values = c.value_size // c.key_heads
    sizes = np.cumsum([c.key_dim, c.key_dim, values])
    heads = np.arange(c.channels + c.value_size).reshape(c.key_heads, -1)
    q, k, v, z = (part.reshape(-1) for part in np.split(heads, sizes, axis=1))
    return {"in_proj_qkv": np.concatenate([q, k, v]), "in_proj_z": z}


def to_gguf(config: ModelConfig, name: str, value: np.ndarray) -> np.ndarray:
    """Convert a tensor, or an adapter's matrix with the same rows or columns, to GGUF's values and order."""
    if name.endswith("linear_attn.A_log"):
        value = -np.exp(value)
    value = mamba_to_gguf(config, name, value)
    axis, order = order_of(config, name) or ("", None)
    if order is None:
        return value
    return np.ascontiguousarray(value[order] if axis == "rows" else value[:, order])


def gguf_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape in GGUF: convolutions have two axes, and tensors of a single row one."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return shape[0], shape[2]
    return shape[1:] if name.endswith(_IN_A_ROW) else mamba_shape(config, name, shape)


@dataclass(frozen=True)
class ChangedEntry(TensorEntry):
    """A small tensor, computed by `change` from the tensor `of` of a file."""

    of: GgufEntry = field(repr=False)
    change: Callable[[np.ndarray], np.ndarray] = field(repr=False, compare=False)

    def array(self) -> np.ndarray:
        return np.ascontiguousarray(self.change(self.of.array()).reshape(self.shape))

    def sample(self, count: int, size: int) -> list[bytes]:
        return self.of.sample(count, size)


@dataclass(frozen=True)
class OrderedEntry(GgufEntry):
    """A matrix whose rows or columns are put back into Hugging Face's order.

    Quantized bytes can be reordered by column only if no block is split; otherwise the decoded array is reordered.

    Attributes:
        axis: "rows" or "columns", as `order_of` returns it.
        back: Inverse of `order_of`'s order.
        block: Columns of a quantized block.
    """

    axis: str
    back: np.ndarray = field(repr=False, compare=False)
    block: int

    def row_bytes(self) -> np.ndarray:
        rows = super().row_bytes()
        if self.axis == "rows":
            return np.ascontiguousarray(rows[self.back])
        if self.shape[1] % self.block or not _in_runs(self.back, self.block):
            return rows  # `array` reorders the decoded columns
        blocks = rows.reshape(len(rows), self.shape[1] // self.block, -1)
        return np.ascontiguousarray(blocks[:, self.back[:: self.block] // self.block].reshape(rows.shape))

    def array(self) -> np.ndarray:
        found = super().array()
        whole = self.axis == "rows" or _in_runs(self.back, self.block)
        return found if whole else np.ascontiguousarray(found[:, self.back])


@dataclass(frozen=True)
class JoinedEntry(GgufEntry):
    """A matrix of the rows of several tensors. back: index of each row in their concatenation."""

    parts: tuple[GgufEntry, ...] = field(repr=False)
    back: np.ndarray = field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, parts: tuple[GgufEntry, ...], back: np.ndarray) -> JoinedEntry:
        """Join parts, which stay quantized if all have the same format."""
        first, size = parts[0], sum(part.size for part in parts)
        same = all(part.stored == first.stored for part in parts)
        fields = (first.source, first.path, name, first.dtype if same else "F32", (len(back), first.shape[1]))
        return cls(*fields, None, None, first.stored, first.offset, size, 0, parts, back)

    def row_bytes(self) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([part.row_bytes() for part in self.parts])[self.back])

    def array(self) -> np.ndarray:
        return np.ascontiguousarray(np.concatenate([np.float32(part.array()) for part in self.parts])[self.back])

    def sample(self, count: int, size: int) -> list[bytes]:
        return [block for part in self.parts for block in part.sample(count, size)]


def _in_runs(order: np.ndarray, length: int) -> bool:
    """Return whether `order` keeps the columns of each block together and in order."""
    if order.size % length:
        return False
    runs = order.reshape(-1, length)
    return bool((runs[:, :1] % length == 0).all() and (runs == runs[:, :1] + np.arange(length)).all())


def from_gguf(entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """Replace the entries whose layout in GGUF differs from the model's."""
    shapes = _shapes_of_mamba(config)
    for name, entry in list(entries.items()):
        if not isinstance(entry, GgufEntry) or isinstance(entry, OrderedEntry):
            continue
        if config.interleaved and entry.heads:  # the model rotates adjacent rows too, so nothing is permuted
            entries[name] = entry = replace(entry, heads=0)
        axis, order = order_of(config, name) or ("", None)
        back = None if order is None else np.argsort(order)
        if name.endswith(_SMALL) or name in shapes:
            change = partial(_restored, name=name, back=back)
            shape = shapes.get(name) or _hugging_face_shape(name, entry.shape)
            shape = shape if math.prod(shape) == math.prod(entry.shape) else entry.shape  # refused later
            entries[name] = ChangedEntry(entry.source, entry.path, name, entry.dtype, shape, None, None, entry, change)
        elif back is not None:
            entries[name] = _ordered(entry, axis, back)

    if isinstance(config.linear, LinearAttention) and config.linear.projected == "by_head":
        _join_by_head(entries, config.linear)
    if config.gate_up_proj or (config.experts is not None and config.experts.shared_fused):
        _join_mlps(entries, config)


def _shapes_of_mamba(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the small tensors of layers with Mamba by name."""
    c = config.linear
    if not isinstance(c, Mamba1 | Mamba2):
        return {}
    layers = [layer for layer, own in enumerate(c.layers) if own]
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in c.others.items()}


def _join_by_head(entries: dict[str, TensorEntry], c: LinearAttention) -> None:
    """Join the two projections that GGUF has of BY_HEAD."""
    rows = rows_by_head(c)
    for layer in range(len(c.layers)):
        prefix = f"model.layers.{layer}."
        names = [f"{prefix}linear_attn.{part}.weight" for part in rows]
        parts = [entry for entry in map(entries.get, names) if isinstance(entry, GgufEntry)]
        if [part.shape[0] for part in parts] == [len(own) for own in rows.values()]:
            back = np.argsort(np.concatenate(list(rows.values())))
            entries[prefix + BY_HEAD] = JoinedEntry.of(prefix + BY_HEAD, tuple(parts), back)
            for name in names:
                del entries[name]


def _join_mlps(entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """Join gate and up of MLPs, or of shared experts, for models that fuse them."""
    experts = config.experts if config.experts is not None and config.experts.shared_fused else None
    owner, width = ("mlp.shared_expert", experts.shared_width) if experts else ("mlp", config.intermediate_size)
    joined, last = (
        (f"{experts.shared}.{part}" for part in ("input_linear", "output_linear"))
        if experts
        else (config.gate_up_proj, config.down_proj)
    )
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        names = [f"{prefix}{owner}.{part}_proj.weight" for part in ("gate", "up")]
        parts = [entry for entry in map(entries.get, names) if isinstance(entry, GgufEntry)]
        if [part.shape for part in parts] == [(width, config.hidden_size)] * 2:
            name = f"{prefix}{joined}.weight"
            entries[name] = JoinedEntry.of(name, tuple(parts), np.arange(2 * width))
            for part in names:
                del entries[part]
            if down := entries.pop(f"{prefix}{owner}.down_proj.weight", None):
                entries[f"{prefix}{last}.weight"] = down


_SMALL = (
    "linear_attn.A_log",
    "linear_attn.dt_bias",
    ".conv1d.weight",
    ".conv.conv.weight",
    *_IN_A_ROW,
)


def _hugging_face_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that `gguf_shape` maps to `shape`."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if name.endswith(_IN_A_ROW) and len(shape) == 1 else shape


def _restored(value: np.ndarray, name: str, back: np.ndarray | None) -> np.ndarray:
    if back is not None:
        value = value[back]
    return restored(name, value)


def _ordered(entry: GgufEntry, axis: str, back: np.ndarray) -> OrderedEntry:
    gguf = require_gguf(entry.source, entry.path)
    block = int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry.stored]][0])
    dtype = entry.dtype if axis == "rows" or _in_runs(back, block) else "F32"
    begin = None
    fields = (entry.source, entry.path, entry.name, dtype, entry.shape, None, begin, entry.stored, entry.offset)
    return OrderedEntry(*fields, entry.size, entry.heads, axis, back, block)


# ---- keys ------------------------------------------------------------------------------------------
def write_linear(writer: Any, config: ModelConfig) -> None:
    """Write the keys of linear attention."""
    c = config.linear
    if isinstance(c, LinearAttention):
        writer.add_ssm_conv_kernel(c.width)
        writer.add_ssm_state_size(c.key_dim)
        writer.add_ssm_group_count(c.key_heads)
        writer.add_ssm_time_step_rank(c.heads)
        writer.add_ssm_inner_size(c.value_size)
        writer.add_full_attention_interval(interval_of(c))
        pairs = config.rope.head_dim // 2
        writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    elif isinstance(c, GatedConvolution):
        writer.add_shortconv_l_cache(c.width)
    write_mamba(writer, config)


def write_key_heads(writer: Any, config: ModelConfig) -> None:
    """Write the number of key heads: one for all layers, or a list with 0 for layers without attention.

    Models with `LinearAttention` always have one number.
    """
    heads, plain = key_heads(config), isinstance(config.linear, LinearAttention)
    writer.add_head_count_kv(config.num_key_value_heads if plain or all(heads) else heads)


def interval_of(c: LinearAttention) -> int:
    """Return N if exactly every N-th layer has attention; 0 if there is no such N."""
    layers = len(c.layers)
    found = (n for n in range(1, layers + 1) if c.layers == tuple((i + 1) % n != 0 for i in range(layers)))
    return next(found, 0)


def without_linear_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of linear attention that GGUF has no key for."""
    if isinstance(config.linear, LinearAttention) and not interval_of(config.linear):
        yield "layers with attention at no fixed interval"
    if isinstance(config.linear, LinearAttention) and config.linear.key_dim != config.linear.value_dim:
        yield "heads of linear attention whose keys and values have other widths"
    yield from without_mamba_place(config)


def keys_of_linear(fields: GgufFields) -> dict[str, Any]:
    """Return the config.json keys of linear attention or of LFM2's convolutions; {} if the model has neither."""
    prefix = fields.architecture + "."
    if prefix + "shortconv.l_cache" in fields:
        counts = fields.whole_numbers(prefix + "attention.head_count_kv")
        kinds = ["full_attention" if count else "conv" for count in counts]
        width = fields.needed(prefix + "shortconv.l_cache", int)
        epsilon = fields.needed(prefix + "attention.layer_norm_rms_epsilon", float)
        plain = {"block_auto_adjust_ff_dim": False, "norm_eps": epsilon}
        return {"conv_L_cache": width, "layer_types": kinds, **plain}
    if prefix + "ssm.time_step_rank" not in fields or fields.traits.mamba:
        return {}
    heads, inner = (fields.needed(prefix + key, int) for key in ("ssm.time_step_rank", "ssm.inner_size"))
    return {
        "linear_conv_kernel_dim": fields.needed(prefix + "ssm.conv_kernel", int),
        "linear_key_head_dim": fields.needed(prefix + "ssm.state_size", int),
        "linear_num_key_heads": fields.needed(prefix + "ssm.group_count", int),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // max(heads, 1),
        "full_attention_interval": fields.get(prefix + "full_attention_interval", int, 4),
    }
