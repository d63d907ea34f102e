"""Adding an adapter to its base weights, tensor by tensor: W + scale B A (with DoRA, rows scaled to its magnitudes).

Source: LoRA (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.files import atomic_folder, free_bytes, write_text
from wgrad.device.host_matmul import host_matmul
from wgrad.train.files.imatrix_file import IMATRIX_FILE, Imatrix
from wgrad.train.model.gguf_mamba import plain_keys
from wgrad.train.model.gguf_model import FILE, GgufModel
from wgrad.train.model.gguf_write import WriteTokenizer, save_gguf
from wgrad.train.model.load_weights import read_restored
from wgrad.train.model.lora import MAGNITUDE, LoraConfig, is_whole
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, Progress
from wgrad.train.model.qat import adapted
from wgrad.train.model.save_model import SaveTokenizer, save_description, save_model
from wgrad.train.model.weights import EMBEDDING, HEAD, WeightSpec, weight_specs
from wgrad.train.options.option_text import size

_FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Merge:
    """An adapter and its base model. original: merge into the files' weights instead of the weights that it was trained
    on, which are NF4 with block_size and double_quant if `quantize`."""

    files: ModelFiles
    config: ModelConfig
    lora: LoraConfig
    arrays: Mapping[str, np.ndarray]
    original: bool
    quantize: bool
    block_size: int
    double_quant: bool

    @property
    def merged(self) -> ModelConfig:
        """Return the merged model's configuration. If the adapter has the embedding or head whole, these are untied."""
        return replace(self.config, tie_word_embeddings=self.config.tie_word_embeddings and not self.whole)

    @property
    def whole(self) -> list[str]:
        """Return the whole weights of the adapter."""
        return [name for name in self.arrays if is_whole(name)]

    def check(self) -> None:
        """Raise WgradError if original weights are asked for and the files have only quantized ones."""
        frozen = [spec.name for spec in weight_specs(self.config) if self.files.is_frozen(spec)]
        if self.original and frozen:
            raise WgradError(
                f"--onto original: {self.files.folder} holds {frozen[0]} quantized: merge onto dequantized, or name "
                "the base model in full precision with --model"
            )

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of the merged weights. name: "auto" means the dtype of the embedding in the files."""
        if name != "auto":
            result: np.dtype = np.dtype(_FLOATS[name])
            return result
        return self.files.dtype(next(spec for spec in weight_specs(self.config) if spec.name == EMBEDDING))

    def value(self, spec: WeightSpec, device: Device) -> np.ndarray:
        """Return a tensor of the merged model as in Hugging Face's files: float32, or the files' dtype if unchanged."""
        if spec.name in self.arrays:
            return self.arrays[spec.name]
        if spec.name == HEAD and self.config.tie_word_embeddings:
            spec = replace(spec, name=EMBEDDING)
        if not spec.is_linear:
            value, within = self.files.read(spec), self.files.offset_within(spec)
            return value - np.float32(within) if within else value
        quantize = self.quantize and not self.original and not self.files.stay_as_they_are(weight_specs(self.config))
        weight = read_restored(self.files, spec, device, quantize, self.block_size, self.double_quant)
        module = spec.name.removesuffix(".weight")
        if f"{module}.lora_A" in self.arrays:
            scale = np.float32(self.lora.scaling_of(module))
            with np.errstate(all="ignore"):  # numbers of a damaged adapter
                a, b = (self.arrays[f"{module}.lora_{side}"] for side in "AB")
                if weight.ndim == 2:
                    base, *sides = (device.upload(np.ascontiguousarray(array)) for array in (weight, a, b))
                    weight = device.download(adapted(base, sides[0], sides[1], float(scale), device))
                else:  # experts
                    weight = weight + scale * host_matmul(b, a)
                if self.lora.dora:
                    lengths = np.linalg.norm(weight, axis=1)
                    weight *= (self.arrays[f"{module}{MAGNITUDE}"] / lengths)[:, None]
            if not np.isfinite(weight).all():
                raise WgradError(
                    f"--adapter: what {module} adds to its weight is not finite (NaN or infinity): the adapter is "
                    "damaged or comes of a training that failed: fetch it again, or train it again"
                )
        return weight


def save_merged(
    merge: Merge,
    out: str | os.PathLike[str],
    dtype: np.dtype,
    device: Device,
    save_tokenizer: SaveTokenizer,
    progress: Progress | None = None,
) -> None:
    """Write the merged model as a folder, which appears only when complete. One tensor at a time is in memory.

    Raises:
        WgradError: The disk is too full, the folder is not empty, or `dtype` cannot hold a sum.
    """
    _check_room(out, sum(math.prod(spec.shape) for spec in weight_specs(merge.merged)) * dtype.itemsize, dtype.name)

    def value(spec: WeightSpec) -> np.ndarray:
        found = merge.value(spec, device)
        with np.errstate(over="ignore"):
            stored = found.astype(np.float32 if spec.float32 else dtype)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise WgradError(
                f"--dtype: {spec.name} has values that {dtype.name} does not hold: use bfloat16 or float32"
            )
        return stored

    with atomic_folder(out) as folder:
        save_model(folder, merge.files.folder, merge.merged, dtype, value, save_tokenizer, progress)


def save_merged_gguf(
    merge: Merge,
    out: str | os.PathLike[str],
    kind: str,
    device: Device,
    save_tokenizer: SaveTokenizer,
    write_tokenizer: WriteTokenizer,
    progress: Progress | None = None,
    over: Mapping[str, str | int] = {},
    more: Mapping[str, str] = {},
    imatrix: Imatrix | None = None,
) -> None:
    """Write the merged model as a GGUF file, in a folder that wgrad reads as a base model.

    kind, imatrix: as for `GgufModel`. over: as for `save_gguf`. more: texts of other files by name.

    Raises:
        WgradError: As `save_merged`, or a GGUF file cannot hold a part of the model.
    """
    model = GgufModel(merge.merged, merge.files, kind, imatrix)
    model.check()
    _check_room(out, model.size, kind)
    with atomic_folder(out) as folder:
        dtype = merge.dtype(kind if kind in _FLOATS else "float16")
        save_description(folder, merge.files.folder, merge.merged, dtype, save_tokenizer, plain_keys(merge.merged))

        def write(writer: Any, gguf: Any, _: Path, vocabulary: int) -> None:
            write_tokenizer(writer, gguf, folder, vocabulary)

        save_gguf(folder / FILE, model, lambda spec: merge.value(spec, device), write, progress, over)
        if imatrix is not None:
            imatrix.save(folder / IMATRIX_FILE)
        for name, text in more.items():
            write_text(folder / name, text)


def _check_room(out: str | os.PathLike[str], need: int, kind: str) -> None:
    free = free_bytes(out)
    if free is not None and free < need:
        raise WgradError(
            f"--out: {os.fspath(out)} takes {size(need)} in {kind}, and the disk has {size(free)} free: "
            "free some space or choose another folder"
        )
