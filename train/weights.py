"""Checkpoints in Hugging Face layout, streamed: each tensor is read, uploaded, quantised and dropped before the next.

A model never stands in memory in full precision. Projections become NF4 (on the device), the embedding and the head
keep the checkpoint's dtype, norms and biases are float32. Checkpoints that bitsandbytes quantised are taken as they are
(nf4_files.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from wgrad.autograd import functional
from wgrad.autograd.device import Array, Device
from wgrad.autograd.errors import WgradError
from wgrad.train.input_files import open_input, reading
from wgrad.train.model_config import ModelConfig
from wgrad.train.nf4_files import is_nf4, read_nf4
from wgrad.train.safetensors_files import TensorEntry, read_entries

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FLOATS = ("F32", "F16", "BF16")
_BLOCKS, _BLOCK = 4, 4096  # of a tensor, in bytes: what a digest reads

Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True)
class WeightSpec:
    """A tensor that the architecture has. kind: embedding, head, projection, norm or bias."""

    name: str
    shape: tuple[int, ...]
    kind: str


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of a layer's seven projections, by their path within the layer."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (config.q_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.q_size),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }


def weight_specs(config: ModelConfig) -> list[WeightSpec]:
    """Every tensor of the model, in the order in which it is computed."""
    specs = [WeightSpec(EMBEDDING, (config.vocab_size, config.hidden_size), "embedding")]
    for layer in range(config.num_hidden_layers):
        specs.extend(_layer_specs(config, f"model.layers.{layer}."))
    specs.append(WeightSpec(FINAL_NORM, (config.hidden_size,), "norm"))
    if not config.tie_word_embeddings:
        specs.append(WeightSpec(HEAD, (config.vocab_size, config.hidden_size), "head"))
    return specs


def _layer_specs(config: ModelConfig, prefix: str) -> Iterator[WeightSpec]:
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias, "o_proj": config.o_bias}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield WeightSpec(f"{prefix}{norm}.weight", (config.hidden_size,), "norm")
    if config.qk_norm:
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            yield WeightSpec(f"{prefix}{norm}.weight", (config.head_dim,), "norm")
    for module, shape in projection_shapes(config).items():
        yield WeightSpec(f"{prefix}{module}.weight", shape, "projection")
        if biased.get(module.rpartition(".")[2], config.mlp_bias):
            yield WeightSpec(f"{prefix}{module}.bias", shape[:1], "bias")


class Checkpoint:
    """The tensors of a checkpoint folder, in one file or in shards. Opening reads only the headers.

    Raises WgradError, naming the file: none there, a shard missing, one cut off or damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        for file in self._files():
            self.entries |= read_entries(file, "--model")

    def _files(self) -> list[Path]:
        index = self.folder / INDEX_FILE
        if index.exists():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise WgradError(f"--model: {index} cannot be read ({error}): fetch the file again") from error
            files = [self.folder / str(name) for name in sorted(set(names))]
            missing = [file.name for file in files if not file.exists()]
            if missing:
                raise WgradError(
                    f"--model: {self.folder} lacks {len(missing)} of {len(files)} shards ({missing[0]}): fetch them"
                )
            return files
        if (self.folder / SINGLE_FILE).exists():
            return [self.folder / SINGLE_FILE]
        others = sorted(p.name for p in self.folder.glob("*.bin")) + sorted(p.name for p in self.folder.glob("*.gguf"))
        hint = f"; {others[0]} is of another format: convert it to safetensors" if others else ""
        raise WgradError(f"--model: {self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint or ': fetch it'}")

    def entry(self, name: str) -> TensorEntry:
        """WgradError where the checkpoint has no such tensor."""
        if name not in self.entries:
            raise WgradError(
                f"--model: {self.folder} has no tensor {name}: config.json and the weights do not belong together, "
                "or a shard is missing: fetch the checkpoint again"
            )
        return self.entries[name]

    def read(self, spec: WeightSpec) -> np.ndarray:
        """The tensor in the file's dtype, mapped. WgradError: missing, another shape, not a float dtype."""
        entry = self.entry(spec.name)
        if entry.dtype not in FLOATS:
            raise WgradError(
                f"--model: {spec.name} in {entry.path} is {entry.dtype}: expected {', '.join(FLOATS)} (or bitsandbytes "
                "NF4): use the unquantised checkpoint"
            )
        if entry.shape != spec.shape:
            raise WgradError(
                f"--model: {spec.name} in {entry.path} has shape {list(entry.shape)}: config.json asks for "
                f"{list(spec.shape)}: fetch the checkpoint again"
            )
        return entry.array()

    def digest(self) -> str:
        """A sum of what the tensors are, wherever they lie: names, dtypes, shapes, and blocks of each one's bytes.

        The first and last block are among them. It reads at most 16 KiB of a tensor: an 8B model in some thousand
        reads. Another model of the same shapes differs in every block; a flipped bit elsewhere is not found.
        """
        total = hashlib.blake2b(digest_size=16)
        files: dict[Path, BinaryIO] = {}
        with contextlib.ExitStack() as stack:
            for name, entry in sorted(self.entries.items()):
                if entry.path not in files:
                    files[entry.path] = stack.enter_context(open_input(entry.path, "--model"))
                total.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
                for block in _sampled_blocks(files[entry.path], entry):
                    total.update(block)
        return total.hexdigest()


def _sampled_blocks(file: BinaryIO, entry: TensorEntry) -> Iterator[bytes]:
    size = entry.end - entry.begin
    with reading(entry.path, "--model"):
        if size <= _BLOCKS * _BLOCK:
            file.seek(entry.begin)
            yield file.read(size)
            return
        for number in range(_BLOCKS):
            file.seek(entry.begin + number * (size - _BLOCK) // (_BLOCKS - 1))
            yield file.read(_BLOCK)


def to_float32(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value, np.float32)


def upload_weight(value: np.ndarray, device: Device) -> Array:
    """Upload in the checkpoint's dtype; float16 becomes float32 on a device without it (bfloat16 works on all)."""
    if value.dtype == np.float16 and not device.float16:
        value = to_float32(value)
    return device.upload(np.ascontiguousarray(value))


def load_frozen(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    device: Device,
    *,
    quantize: bool = True,
    double_quant: bool = True,
    block_size: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Name -> Array or NF4Array of every tensor of `weight_specs`, frozen.

    quantize: projections become NF4 on the device; else they keep the checkpoint's dtype. Raises WgradError.
    """
    checkpoint = Checkpoint(folder)
    specs = weight_specs(config)
    weights: dict[str, Any] = {}
    for done, spec in enumerate(specs):
        if spec.kind == "projection" and is_nf4(checkpoint.entries, spec.name):
            weights[spec.name] = read_nf4(checkpoint.entries, spec.name, spec.shape, device)
        elif spec.kind in ("norm", "bias"):
            weights[spec.name] = device.upload(to_float32(checkpoint.read(spec)))
        elif spec.kind == "projection" and quantize:
            full = upload_weight(checkpoint.read(spec), device)
            weights[spec.name] = functional.nf4_quantize(device, full, block_size, double=double_quant)
            del full
        else:
            weights[spec.name] = upload_weight(checkpoint.read(spec), device)
        if progress:
            progress(done + 1, len(specs))
    return weights


def load_trainable(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    arrays: Mapping[str, Array],
    device: Device,
    progress: Progress | None = None,
) -> None:
    """Write every tensor, as float32, into the arrays of the same name (for --full). Raises WgradError."""
    checkpoint = Checkpoint(folder)
    specs = weight_specs(config)
    for done, spec in enumerate(specs):
        if is_nf4(checkpoint.entries, spec.name):
            raise WgradError(f"--full: {checkpoint.folder} is quantised: all parameters cannot be trained; drop --full")
        device.write(arrays[spec.name], to_float32(checkpoint.read(spec)))
        if progress:
            progress(done + 1, len(specs))
