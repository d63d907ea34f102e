"""Frozen weights, streamed to the device: each tensor is read, written there, quantized and dropped before the next.

A model never stands in memory in full precision. Projections become NF4 (on the device; experts a few at a time), the
embedding and the head keep the files' dtype, norms and biases are float32. Weights that are quantized already are taken
as they are, and with quantize=False all are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device
from wgrad.device.errors import OutOfMemory, WgradError
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, Progress, dtype_of, open_files
from wgrad.train.model.pissa import PissaStart
from wgrad.train.model.quantize_parts import quantize_parts
from wgrad.train.model.read_ahead import pieces as piece_bounds
from wgrad.train.model.read_ahead import read_ahead
from wgrad.train.model.stacks import stack_if_last
from wgrad.train.model.weights import EMBEDDING, WeightSpec, weight_specs


def _open(folder: str | os.PathLike[str], config: ModelConfig) -> ModelFiles:
    files, own, _ = open_files(folder, config)
    if own != config:
        raise ValueError("the head is not tied: take the configuration from use_own_head")
    return files


def _value(files: ModelFiles, spec: WeightSpec) -> np.ndarray:
    """Read a tensor as the model uses it: a norm's weight with its offset."""
    value, offset = files.read(spec), spec.offset - files.offset_within(spec)
    return value.astype(np.float32) + np.float32(offset) if offset else value


def dtype_on_device(files: ModelFiles, spec: WeightSpec) -> np.dtype:
    """Return a tensor's dtype on the device: float32 for norms and biases, else the files' dtype.

    Raise WgradError as `ModelFiles.read` does.
    """
    return np.dtype(np.float32) if spec.kind in ("norm", "bias") else files.dtype(spec)


def place(
    files: ModelFiles,
    spec: WeightSpec,
    device: Device,
    contents: bool = True,
    empty: Callable[..., Array] | None = None,
    start: PissaStart | None = None,
    pieces: Iterator[np.ndarray] | None = None,
) -> Array:
    """Load a tensor onto the device with the dtype of `dtype_on_device`.

    Args:
        files: Files of the model.
        spec: The tensor.
        device: Device.
        contents: Whether to read its values.
        empty: Allocates the array, if not `Device.empty`.
        start: Subtracts an adapter's start from a projection.
        pieces: Pieces of the tensor in the files' dtype, if they have been read.
    """
    dtype = dtype_on_device(files, spec)
    if not contents:
        return (empty or device.empty)(spec.shape, dtype)
    if pieces is not None:
        array = (empty or device.empty)(spec.shape, dtype)
        for first, count in piece_bounds(int(np.prod(spec.shape)), dtype.itemsize):
            device.write(device.view(array, (count,), first), next(pieces))
        return array
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
    """Return whether a frozen tensor always stays in main memory: an embedding that is not also the head, and
    per-layer embeddings.

    A step reads only some rows of it, a few KiB for a token of 10^9 operations; on the device such a table would be a
    tenth to a fifth of all weights.
    """
    apart = spec.kind == "embedding" and (spec.name != EMBEDDING or not config.tie_word_embeddings)
    return apart and device.host_buffers and not device.shared_memory


def _rows(weight: Array, device: Device) -> Array:
    """Return the rows of all experts, stacked."""
    return (
        weight if len(weight.shape) == 2 else device.view(weight, (weight.size // weight.shape[-1], weight.shape[-1]))
    )


class Loader:
    """Loads the frozen weights of a base model one by one.

    Args:
        quantize: Whether the device quantizes projections to NF4. Otherwise they keep the files' dtype.
        double_quant, block_size: Options of NF4.
        start: PiSSA's start, which is subtracted from the weights.

    Raises:
        WgradError: The files cannot be read or do not fit `config`.
        ValueError: `config` ties a head that the files do not (`use_own_head`).
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
        self.files, self.start, self.config = _open(folder, config), start, config
        self.specs = weight_specs(config)
        self.quantize = quantize and not self.files.stay_as_they_are(self.specs)
        self._double_quant, self._block_size = double_quant, block_size

    def load(
        self, spec: WeightSpec, device: Device, contents: bool = True, pieces: Iterator[np.ndarray] | None = None
    ) -> Any:
        """Load an Array or FrozenWeight onto the device or into main memory (`read_from_main_memory`).

        contents: False, for a dry run, gives the right shapes and dtypes and reads next to nothing. pieces: Pieces of
        the tensors of `read_ahead`.
        """
        if spec.is_linear and self.files.is_frozen(spec):
            return self.files.read_frozen(spec, device, contents)
        pieces = pieces if self._ahead(spec, device) else None
        if spec.kind == "experts" and self.quantize:
            entry, dtype = self.files.float_entry(spec), dtype_on_device(self.files, spec)
            return quantize_parts(entry, dtype, device, self._block_size, self._double_quant, contents, pieces)
        if read_from_main_memory(spec, self.config, device):
            try:
                return place(self.files, spec, device, contents, device.empty_host, pieces=pieces)
            except OutOfMemory:  # systems may limit the main memory that devices can read: use the device's instead
                pass
        full = place(self.files, spec, device, contents, start=self.start, pieces=pieces)
        if spec.is_linear and self.quantize:
            return device.quantize(_rows(full, device), self._block_size, double=self._double_quant)
        return full

    def read_ahead(self, specs: Iterable[WeightSpec], device: Device) -> Generator[np.ndarray]:
        """Read these tensors ahead for `load` in this order. The caller closes the result."""
        entries = (self._ahead(spec, device) for spec in specs)
        return read_ahead((entry, dtype_of(entry)) for entry in entries if entry is not None)

    def _ahead(self, spec: WeightSpec, device: Device) -> TensorEntry | None:
        """Return the entry of a tensor that is read in pieces."""
        if spec.is_linear and self.files.is_frozen(spec) or (spec.kind == "projection" and self.start is not None):
            return None
        return self.files.readable_ahead(spec, dtype_on_device(self.files, spec))

    def all(
        self, device: Device, progress: Progress | None = None, contents: bool = True, stacked: bool = False
    ) -> dict[str, Any]:
        """Return the weight of every tensor of `weight_specs` by name. stacked: stack projections (stacks.py)."""
        weights: dict[str, Any] = {}
        with closing(self.read_ahead(self.specs, device)) as pieces:
            for done, spec in enumerate(self.specs):
                weights[spec.name] = self.load(spec, device, contents, pieces)
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
    """Return every tensor of `weight_specs` as an Array or FrozenWeight on the device by name (`Loader`)."""
    return Loader(folder, config, quantize, double_quant, block_size, start).all(device, progress, contents, stacked)


def read_restored(
    files: ModelFiles, spec: WeightSpec, device: Device, quantize: bool, block_size: int, double_quant: bool
) -> np.ndarray:
    """Return a projection in float32, dequantized if the files or, with `quantize`, `load_frozen` quantize it.

    Raises:
        WgradError: The files are damaged.
    """
    if files.is_frozen(spec):
        weight = files.read_frozen(spec, device, True)
    elif quantize:
        weight = device.quantize(_rows(place(files, spec, device), device), block_size, double=double_quant)
    else:
        return files.read(spec).astype(np.float32)
    return device.download(device.dequantize(weight)).reshape(spec.shape)


def load_untrained(
    folder: str | os.PathLike[str], config: ModelConfig, device: Device, contents: bool = True
) -> dict[str, Tensor]:
    """Return the tensors that training never changes by name. contents: as for `place`. Raise WgradError if damaged."""
    specs = [spec for spec in weight_specs(config) if not spec.trained]
    files = _open(folder, config) if specs else None
    return {spec.name: Tensor(place(files, spec, device, contents), device) for spec in specs if files is not None}


def load_trainable(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    arrays: Mapping[str, Array],
    device: Device,
    progress: Progress | None = None,
    contents: bool = True,
) -> None:
    """Write tensors as float32 into the arrays of the same names. contents: False checks without writing.

    Raises:
        WgradError: The files are damaged.
    """
    files = _open(folder, config)
    specs = [spec for spec in weight_specs(config) if spec.name in arrays]
    for done, spec in enumerate(specs):
        if files.is_frozen(spec):
            raise WgradError(f"--full: {files.folder} is quantized: all parameters cannot be trained; drop --full")
        if contents:
            device.write(arrays[spec.name], np.ascontiguousarray(_value(files, spec), np.float32))
        if progress:
            progress(done + 1, len(specs))
