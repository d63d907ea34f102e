"""Loading of weights that stay in main memory: the device quantizes them once, and later runs read them from a file.

The file, one for each base model in the user's cache, is safetensors: `layer.N` uint8 (a layer's buffer) and `crc32`
uint32 of each. It is written atomically, and made again if a checksum does not match.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.cache import cache_folder, is_kept, kept_paths, make_private
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError
from wgrad.device.files import remove_leftovers, writing
from wgrad.train.files.safetensors_files import TensorSource, read_entries, write_safetensors
from wgrad.train.model.host_layers import (
    HostLayer,
    Layer,
    ResidentLayer,
    SplitLayer,
    Weights,
    arrays_of,
    stays,
)
from wgrad.train.model.load_weights import Loader, place
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, Progress
from wgrad.train.model.pissa import PissaStart
from wgrad.train.model.stacks import stack_biases
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import EMBEDDING, HEAD, outer_projections, weight_specs

FORMAT = 1
MOST_BYTES = 128 << 30  # of all these files; the least recently used are removed first
SUFFIX = ".layers.safetensors"
_CHECKS = "crc32"
_LAYERS = "model.layers."


def cached_weights() -> Path:
    """Return the folder of these files, which may be removed at any time."""
    return cache_folder("weights")


def load_streamed(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    device: Device,
    *,
    quantize: bool = True,
    double_quant: bool = True,
    block_size: int = 64,
    progress: Progress | None = None,
    contents: bool = True,
    remarks: list[str] | None = None,
    start: PissaStart | None = None,
    resident: int = 0,
    keep_head: bool = False,
    slots: int = 0,
) -> StreamedWeights:
    """Load the weights of `load_frozen` into main memory.

    Args:
        remarks: Messages to the user are appended to this.
        resident: Number of layers whose weights stay on the device.
        keep_head: Whether the head stays on the device.
        slots: Slots of each layer for the experts used last. If there are any, only experts are in main memory.

    Raises:
        WgradError: The model's files cannot be read or do not fit config.json.
    """
    loader = Loader(folder, config, quantize, double_quant, block_size, start)
    shapes = list(_by_layer(config, loader.all(device.dry_run(), contents=False)))
    experts = frozenset(spec.name for spec in loader.specs if spec.kind == "experts")

    def make(number: int, weights: Weights) -> Layer:
        if slots and experts & weights.keys():
            return SplitLayer.like(weights, experts, device)
        if slots or stays(number, len(shapes), resident):
            return ResidentLayer(weights)
        return HostLayer.like(weights, device)

    layers = [make(number, weights) for number, weights in enumerate(shapes)]
    remarks = [] if remarks is None else remarks
    kept = contents and loader.quantize and start is None  # PiSSA's weights belong to one run
    path = _path(loader.files, double_quant, block_size) if kept else None
    known = path is not None and _read(path, layers, device, remarks)
    others, tables = _others(loader, device, contents, keep_head)
    if not known:
        _load(loader, layers, device, contents, progress)
        if path is not None:
            _write(path, layers, device, remarks)
    count = config.experts.count if config.experts else 0
    return StreamedWeights(device, others, tables, layers, experts, chosen_share(config), slots, count)


def chosen_share(config: ModelConfig) -> float:
    """Return the share of a layer's experts that a token chooses; 0 without experts."""
    return 0.0 if config.experts is None else config.experts.chosen / config.experts.count


def _names_by_layer(config: ModelConfig) -> list[list[str]]:
    """Return the names of each layer's projections."""
    layers: list[list[str]] = [[] for _ in range(config.num_hidden_layers)]
    for spec in weight_specs(config):
        if spec.is_linear and spec.name.startswith(_LAYERS):
            layers[int(spec.name.removeprefix(_LAYERS).partition(".")[0])].append(spec.name)
    return layers


def _by_layer(config: ModelConfig, weights: Mapping[str, Any]) -> Iterator[Weights]:
    for names in _names_by_layer(config):
        yield {name: weights[name] for name in names}


def _others(loader: Loader, device: Device, contents: bool, keep_head: bool) -> tuple[Weights, Weights]:
    """Load the weights outside of the streamed layers.

    Returns:
        Norms, biases and projections outside of layers on the device, and embedding and head in main memory.
    """
    outer = {f"{module}.weight" for module in outer_projections(loader.config)}
    head = EMBEDDING if loader.config.tie_word_embeddings else HEAD
    resident: Weights = {}
    tables: Weights = {}
    for spec in loader.specs:
        if keep_head and spec.name == head:
            resident[spec.name] = place(loader.files, spec, device, contents)
        elif spec.kind in ("embedding", "head"):
            tables[spec.name] = place(loader.files, spec, device, contents, device.empty_host)
        elif spec.name in outer:
            resident[spec.name] = loader.load(spec, device, contents)
        elif not spec.is_linear:
            resident[spec.name] = place(loader.files, spec, device, contents)
    if device.stacks_weights:
        stack_biases(resident, device)
    return resident, tables


def _load(loader: Loader, layers: Sequence[Layer], device: Device, contents: bool, progress: Progress | None) -> None:
    """Quantize each projection on the device, and move it into its layer in main memory unless the layer is resident.

    contents: as for `place`.
    """
    places = {name: layer for layer, names in zip(layers, _names_by_layer(loader.config)) for name in names}
    specs = [spec for spec in loader.specs if spec.name in places]
    with closing(loader.read_ahead(specs, device)) as pieces:
        for done, spec in enumerate(specs):
            made = loader.load(spec, device, contents, pieces)
            layer = places[spec.name].part_of(spec.name)
            if isinstance(layer, ResidentLayer):
                layer.weights[spec.name] = made
            elif contents:
                _transfer(made, layer.weights[spec.name], device)
            del made
            if progress:
                progress(done + 1, len(specs))


def _transfer(weight: Any, there: Any, device: Device) -> None:
    """Copy a weight's arrays. A function of its own, since its variables would keep them while the next one is made."""
    for source, target in zip(*(arrays_of({"": one}) for one in (weight, there)), strict=True):
        device.transfer(source, target)


# ---- the file ----------------------------------------------------------------------------
def _path(files: ModelFiles, double_quant: bool, block_size: int) -> Path:
    """Return the path of this base model's layers with these quantization options. All devices quantize to equal bits.

    The key includes the files' modification times, since `digest` only samples large tensors.
    """
    written = sorted({entry.path.stat().st_mtime_ns for entry in files.entries.values()})
    key = f"{FORMAT} {files.digest()} {written} nf4 {double_quant} {block_size}"
    return cached_weights() / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + SUFFIX)


def _read(path: Path, layers: Sequence[Layer], device: Device, remarks: list[str]) -> bool:
    """Fill the layers from the file, and return whether that was possible."""
    if not is_kept(path):
        return False
    try:
        entries = read_entries(path, "--stream-weights")
        checks = _entry(entries, _CHECKS, "U32", len(layers))
        for number, layer in enumerate(layers):
            data = _entry(entries, f"layer.{number}", "U8", layer.nbytes)
            if zlib.crc32(data.data) != checks[number]:
                raise WgradError(f"layer.{number} in {path} has other bytes than were written")
            layer.write(data, device)
    except WgradError as error:
        remarks.append(f"{error}: the weights are quantized again")
        return False
    with suppress(FileNotFoundError):  # removed meanwhile
        os.utime(path)  # `_make_room` removes the least recently used
    return True


def _entry(entries: Mapping[str, Any], name: str, dtype: str, size: int) -> np.ndarray:
    entry = entries.get(name)
    if entry is None or entry.dtype != dtype or entry.shape != (size,):
        raise WgradError(f"--stream-weights: the cached weights have no {name} of {size:,} {dtype}")
    values: np.ndarray = entry.array()
    return values


def _write(path: Path, layers: Sequence[Layer], device: Device, remarks: list[str]) -> None:
    """Write the layers to the file. If that fails, add a remark and go on."""
    checks: list[int] = []

    def layer_bytes(layer: Layer) -> np.ndarray:
        data = layer.read(device)
        checks.append(zlib.crc32(data.data))
        return data

    sources = [
        TensorSource(f"layer.{n}", np.dtype(np.uint8), (layer.nbytes,), partial(layer_bytes, layer))
        for n, layer in enumerate(layers)
    ]
    sources.append(TensorSource(_CHECKS, np.dtype(np.uint32), (len(layers),), lambda: np.array(checks, np.uint32)))
    nbytes = sum(layer.nbytes for layer in layers)
    try:
        with writing(path.parent, "$XDG_CACHE_HOME"):
            make_private(path.parent)
            remove_leftovers(path.parent)
            _make_room(nbytes)
        write_safetensors(path, sources)
    except WgradError as error:
        remarks.append(f"the quantized weights are not kept for the next run: {error}")
        return
    remarks.append(
        f"the quantized weights ({nbytes / 2**30:.2f} GiB) are kept in {path.parent} for the next run (at most "
        f"{MOST_BYTES >> 30} GiB in all): wgrad cache clear removes them"
    )


def cached_files() -> list[Path]:
    """Return the cached files, most recently used first."""
    kept = kept_paths(cached_weights(), f"*{SUFFIX}")
    found = [(state, path) for path in kept if (state := _state(path)) is not None]
    return [path for _, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True)]


def _state(path: Path) -> os.stat_result | None:
    """Return the state of a cached file; None if another process has removed it, or it cannot be read."""
    try:
        return path.stat()
    except OSError:
        return None


def _make_room(nbytes: int) -> None:
    """Remove the least recently used files until a file of `nbytes` fits into MOST_BYTES."""
    total = nbytes
    for path in cached_files():
        state = _state(path)
        total += 0 if state is None else state.st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
