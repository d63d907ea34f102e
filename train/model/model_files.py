"""Models in Hugging Face layout, streamed: each tensor is read, uploaded, quantised and dropped before the next.

A model never stands in memory in full precision. Projections become NF4 (on the device), the embedding and the head
keep the files' dtype, norms and biases are float32. Weights that are quantised already are taken as they are, and with
quantize=False all are: those of bitsandbytes (nf4_files.py) and whatever is in a GGUF file (gguf_files.py: one in the
folder, beside config.json and the tokenizer).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np
from msgspec import Struct

from wgrad.device.contract import Array, Device
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.train.files.decode import read_json, show
from wgrad.train.files.gguf_files import GgufEntry, is_frozen_gguf, read_gguf_entries
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.files.nf4_files import check_packed, is_nf4, read_nf4
from wgrad.train.files.safetensors_files import TensorEntry, read_entries
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.multimodal import text_name
from wgrad.train.model.pissa import PissaStart
from wgrad.train.model.stacks import stack_if_last
from wgrad.train.model.weights import EMBEDDING, HEAD, WeightSpec, weight_specs

INDEX_FILE, SINGLE_FILE, GGUF = "model.safetensors.index.json", "model.safetensors", ".gguf"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = tuple(_DTYPES)


def dtype_of(entry: TensorEntry) -> np.dtype:
    """Of a tensor of FLOATS."""
    return _DTYPES[entry.dtype]


Progress = Callable[[int, int], None]  # tensors done, tensors in all


class _Index(Struct):
    """model.safetensors.index.json: tensor -> the shard that holds it."""

    weight_map: dict[str, str]


class ModelFiles:
    """The tensors of a model's folder, in one file or in shards, those of a multimodal model's text part by the names
    that it has alone. Opening reads only the headers.

    Raises WgradError, naming the file: none there, a shard missing, one cut off or damaged, one outside the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, TensorEntry] = {}
        for file in self._files():
            found = (read_gguf_entries if file.suffix == GGUF else read_entries)(file, "--model")
            self.entries |= {text_name(name): entry for name, entry in found.items()}

    def _files(self) -> list[Path]:
        index = self.folder / INDEX_FILE
        if exists(index, "--model"):
            names = sorted(set(read_json(index, _Index, "--model").weight_map.values()))
            for name in names:
                if _leaves_folder(name):
                    raise WgradError(
                        f"--model: {index}: weight_map must name files within its folder; got {show(name)}: do not "
                        "trust this model: fetch it from its owner"
                    )
            missing = [name for name in names if not exists(self.folder / name, "--model")]
            if missing:
                first = one_line(missing[0])
                raise WgradError(
                    f"--model: {self.folder} lacks {len(missing)} of {len(names)} shards ({first}): fetch them"
                )
            return [self.folder / name for name in names]
        if exists(self.folder / SINGLE_FILE, "--model"):
            return [self.folder / SINGLE_FILE]
        whole = sorted(self.folder.glob(f"*{GGUF}"))
        if len(whole) > 1:
            first = ", ".join(one_line(path.name) for path in whole[:3])
            raise WgradError(f"--model: {self.folder} must have one {GGUF} file, got {len(whole)} ({first}): keep one")
        if whole:
            return whole
        others = sorted(p.name for p in self.folder.glob("*.bin"))
        hint = f"; {others[0]} is of another format: convert it to safetensors" if others else ""
        raise WgradError(
            f"--model: {self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE} nor a {GGUF} file{hint or ': fetch it'}"
        )

    def entry(self, name: str) -> TensorEntry:
        """WgradError where the files have no such tensor."""
        if name not in self.entries:
            raise WgradError(
                f"--model: {self.folder} has no tensor {name}: config.json and the weights do not belong together, "
                "or a shard is missing: fetch the model again"
            )
        return self.entries[name]

    def check(self, config: ModelConfig) -> None:
        """WgradError where a tensor of the model is missing or does not fit config.json. Reads no tensor: what a model
        takes is known to be in its files before any memory is taken for it."""
        if config.tie_word_embeddings and EMBEDDING not in self.entries and HEAD in self.entries:
            self.entries[EMBEDDING] = self.entries[HEAD]  # one matrix: either name will do, as in transformers
        for spec in weight_specs(config):
            if spec.kind != "projection" or not self.is_frozen(spec):
                self._float_entry(spec)
            elif is_nf4(self.entries, spec.name):
                check_packed(self.entries, spec.name, spec.shape)
            else:
                self._check_shape(spec, self.entries[spec.name])

    def is_frozen(self, spec: WeightSpec) -> bool:
        """Whether the files hold this tensor in a format of few bits, which stays as it is."""
        return is_nf4(self.entries, spec.name) or is_frozen_gguf(self.entries.get(spec.name))

    def beside_text(self) -> list[TensorEntry]:
        """What a multimodal model has beside its text part. WgradError: nothing, or tensors of few bits."""
        own = {name: entry for name, entry in self.entries.items() if not isinstance(entry, GgufEntry)}
        found = [entry for name, entry in own.items() if entry.name == name and not name.startswith("lm_head.")]
        if not found or any(entry.dtype not in FLOATS for entry in found):
            what = "only the text part of a multimodal model" if not found else f"{one_line(found[0].name)} in few bits"
            raise WgradError(
                f"--model: {self.folder} has {what}: use --format gguf, or name the whole model in 16 bits with --model"
            )
        return found

    def stay_as_they_are(self, specs: Iterable[WeightSpec]) -> bool:
        """Whether no projection is to be quantised: of weights that are already, what is in float is to stay so
        (bitsandbytes' llm_int8_skip_modules); a GGUF file is what its maker chose, in float too."""
        return any(self.is_frozen(spec) or isinstance(self.entries.get(spec.name), GgufEntry) for spec in specs)

    def read_frozen(self, spec: WeightSpec, device: Device, contents: bool) -> FrozenWeight:
        """Such a projection on the device. contents False, for a dry run: hardly a thing is read. WgradError."""
        entry = self.entries.get(spec.name)
        if isinstance(entry, GgufEntry):
            return entry.upload_frozen(device, contents)
        return read_nf4(self.entries, spec.name, spec.shape, device, contents)

    def read(self, spec: WeightSpec) -> np.ndarray:
        """The tensor in the file's dtype. WgradError: missing, another shape, not a float dtype, not finite."""
        return self._float_entry(spec).finite_array()

    def offset_within(self, spec: WeightSpec) -> float:
        """What a tensor is above that of Hugging Face's files: a GGUF file has norms as the model takes them."""
        return spec.offset if isinstance(self.entries.get(spec.name), GgufEntry) else 0.0

    def dtype(self, spec: WeightSpec) -> np.dtype:
        """The file's dtype of a tensor. WgradError as in `read`."""
        return dtype_of(self._float_entry(spec))

    def _float_entry(self, spec: WeightSpec) -> TensorEntry:
        entry = self.entry(spec.name)
        if entry.dtype not in FLOATS:
            known = [*FLOATS, *(gguf_formats() if isinstance(entry, GgufEntry) else ["bitsandbytes' NF4"])]
            raise WgradError(
                f"--model: {spec.name} in {entry.path} is {entry.dtype}: expected {', '.join(known)}: use the "
                "unquantised model"
            )
        self._check_shape(spec, entry)
        return entry

    def _check_shape(self, spec: WeightSpec, entry: TensorEntry) -> None:
        if entry.shape != spec.shape:
            raise WgradError(
                f"--model: {spec.name} in {entry.path} has shape {list(entry.shape)}: config.json asks for "
                f"{list(spec.shape)}: fetch the model again"
            )

    def digest(self) -> str:
        """A sum of what the tensors are, wherever they lie: names, dtypes, shapes, and blocks of each one's bytes.

        At most 16 KiB of a tensor are read: of an 8B model 5 MB. Another model of the same shapes differs in every
        block; a single number that is changed in a large tensor is seldom found.
        """
        total = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self.entries.items()):
            total.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            for block in entry.sample(4, 4096):
                total.update(block)
        return total.hexdigest()


def _leaves_folder(name: str) -> bool:
    """Whether a path of an index is absolute or climbs out, by the rules of any system (links of a cache are fine)."""
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return any(p.is_absolute() or p.drive or p.root or ".." in p.parts for p in paths)


def use_own_head(config: ModelConfig, files: ModelFiles) -> tuple[ModelConfig, str]:
    """-> the configuration, and a note for the user ("" where there is none), where a model whose config.json says
    that the head is the embedding has a head with other values: it is used, as transformers 5 does."""
    head, embedding = files.entries.get(HEAD), files.entries.get(EMBEDDING)
    if not config.tie_word_embeddings or head is None or embedding is None or _same(head, embedding):
        return config, ""
    note = f"config.json ties the head to the embedding, but {HEAD} has other values: it is used, and not tied"
    return dataclasses.replace(config, tie_word_embeddings=False), note


def _same(a: TensorEntry, b: TensorEntry) -> bool:
    if a.shape != b.shape or len(a.shape) != 2 or not {a.dtype, b.dtype} <= set(FLOATS):
        return False
    return all(
        np.array_equal(x.astype(np.float32), y.astype(np.float32)) for x, y in zip(a.blocks(1024), b.blocks(1024))
    )


def open_files(folder: str | os.PathLike[str], config: ModelConfig) -> tuple[ModelFiles, ModelConfig, str]:
    """The files, checked without reading a tensor; configuration and note as of `use_own_head`. WgradError."""
    files = ModelFiles(folder)
    config, note = use_own_head(config, files)
    files.check(config)
    return files, config, note


def _open(folder: str | os.PathLike[str], config: ModelConfig) -> ModelFiles:
    files, own, _ = open_files(folder, config)
    if own != config:
        raise ValueError("the head is not tied: take the configuration from use_own_head")
    return files


def _value(files: ModelFiles, spec: WeightSpec) -> np.ndarray:
    """A tensor as the model takes it: a norm's weight with its offset."""
    value, offset = files.read(spec), spec.offset - files.offset_within(spec)
    return value.astype(np.float32) + np.float32(offset) if offset else value


def place(
    files: ModelFiles,
    spec: WeightSpec,
    device: Device,
    contents: bool = True,
    empty: Callable[..., Array] | None = None,
    start: PissaStart | None = None,
) -> Array:
    """A tensor on the device: norms and biases as float32, others in the files' dtype; but float16 becomes
    float32 on a device without it (bfloat16 works on all). empty: makes the array, where not the device's own.
    start: takes its part of a projection out of it."""
    dtype = files.dtype(spec)
    if spec.kind in ("norm", "bias") or (dtype == np.float16 and not device.float16):
        dtype = np.dtype(np.float32)
    if not contents:
        return (empty or device.empty)(spec.shape, dtype)
    value = _value(files, spec)
    if start is not None and spec.kind == "projection":
        value = start.residual(spec.name.removesuffix(".weight"), value)
    value = np.ascontiguousarray(value, dtype)
    if empty is None:
        return device.upload(value)
    array = empty(spec.shape, dtype)
    device.write(array, value)
    return array


def read_from_main_memory(spec: WeightSpec, config: ModelConfig, device: Device) -> bool:
    """Whether a tensor that is frozen lies there for good: an embedding that is not the head as well. A step looks up
    some rows of it, each a few KiB where a token takes 10^9 operations, and reads them where they lie; on the device
    such a table is a tenth to a fifth of all weights."""
    apart = spec.kind == "embedding" and not config.tie_word_embeddings
    return apart and device.host_buffers and not device.shared_memory


class Loader:
    """The frozen weights of a base model, one by one. quantize: projections become NF4 on the device; else they keep
    the files' dtype. start: what is loaded is the rest that such an adapter leaves. Raises WgradError; ValueError where
    `config` ties a head that the files do not (`use_own_head`).
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: ModelConfig,
        quantize: bool = True,
        double_quant: bool = True,
        block_size: int = 64,
        start: PissaStart | None = None,
    ) -> None:
        self.files, self.start, self._config = _open(folder, config), start, config
        self.specs = weight_specs(config)
        self.quantize = quantize and not self.files.stay_as_they_are(self.specs)
        self._double_quant, self._block_size = double_quant, block_size

    def load(self, spec: WeightSpec, device: Device, contents: bool = True) -> Any:
        """An Array or FrozenWeight on the device, or where `read_from_main_memory` says. contents False, for a dry run:
        shapes and dtypes are right, and hardly a thing is read."""
        if spec.kind == "projection" and self.files.is_frozen(spec):
            return self.files.read_frozen(spec, device, contents)
        if read_from_main_memory(spec, self._config, device):
            try:
                return place(self.files, spec, device, contents, device.empty_host)
            except OutOfMemory:  # a system may limit what devices reach: then it lies on the device
                pass
        full = place(self.files, spec, device, contents, start=self.start)
        if spec.kind == "projection" and self.quantize:
            return device.quantize(full, self._block_size, double=self._double_quant)
        return full

    def all(
        self, device: Device, progress: Progress | None = None, contents: bool = True, stacked: bool = False
    ) -> dict[str, Any]:
        """Name -> weight of every tensor of `weight_specs`; stacked: and of stacks (stacks.py)."""
        weights: dict[str, Any] = {}
        for done, spec in enumerate(self.specs):
            weights[spec.name] = self.load(spec, device, contents)
            if stacked:
                stack_if_last(weights, spec.name, device)
            if progress:
                progress(done + 1, len(self.specs))
        return weights


def load_frozen(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    device: Device,
    *,
    quantize: bool = True,
    double_quant: bool = True,
    block_size: int = 64,
    stacked: bool = False,
    progress: Progress | None = None,
    contents: bool = True,
    start: PissaStart | None = None,
) -> dict[str, Any]:
    """Name -> Array or FrozenWeight of every tensor of `weight_specs`, frozen, on the device: see `Loader`."""
    return Loader(folder, config, quantize, double_quant, block_size, start).all(device, progress, contents, stacked)


def read_restored(
    files: ModelFiles, spec: WeightSpec, device: Device, quantize: bool, block_size: int, double_quant: bool
) -> np.ndarray:
    """A projection in float32: what a weight of few bits stands for, in the files or, with `quantize`, as `load_frozen`
    makes it of one in full precision; else as the files have it. WgradError."""
    if files.is_frozen(spec):
        weight = files.read_frozen(spec, device, True)
    elif quantize:
        weight = device.quantize(place(files, spec, device), block_size, double=double_quant)
    else:
        return files.read(spec).astype(np.float32)
    return device.download(device.dequantize(weight))


def load_trainable(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    arrays: Mapping[str, Array],
    device: Device,
    progress: Progress | None = None,
    contents: bool = True,
) -> None:
    """Write tensors, as float32, into the arrays of the same name. Raises WgradError.

    contents False: all is checked, and nothing written.
    """
    files = _open(folder, config)
    specs = [spec for spec in weight_specs(config) if spec.name in arrays]
    for done, spec in enumerate(specs):
        if files.is_frozen(spec):
            raise WgradError(f"--full: {files.folder} is quantised: all parameters cannot be trained; drop --full")
        if contents:
            device.write(arrays[spec.name], np.ascontiguousarray(_value(files, spec), np.float32))
        if progress:
            progress(done + 1, len(specs))
